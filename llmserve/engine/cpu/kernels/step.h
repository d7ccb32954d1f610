// One planned step as flat arrays, filled by `step.py` from a StepPlan, and the checks that make it safe to run.
#pragma once

#include <cstdint>
#include <span>

#include "error.h"
#include "format.h"

namespace llmserve {

// A run of consecutive tokens of one sequence.
struct ChunkRecord {
  uint32_t first_token;  // index into token_ids
  uint32_t num_tokens;
  uint32_t start;        // position of the first token
  uint32_t first_block;  // index into block_ids, where the sequence's tables lie one after the other
  uint32_t num_blocks;   // of each table
  uint32_t state_before;  // slot of the state that the sequence has before its first token here; of no one at its start
  uint32_t state_after;   // and after its last: perhaps the same slot
  uint32_t state_kept;    // a third, or the first, for the state after `num_kept` of its tokens, fewer than all
  uint32_t num_kept;      // 0: it is not wanted
  uint32_t second_segment;  // position from which on tokens belong to a second text; 0: there is one
  uint32_t adapter;      // the slot of its adapter (adapters.h); 0: none
};

constexpr uint32_t kNoMask = UINT32_MAX;
constexpr uint32_t kMaskBits = 32;  // of a word

// One draw: several of one chunk are several records, each with its own position and history. Ranges [begin, end) index
// `sample_ids`; biases are ids there and numbers at the same index of `bias_values`.
struct SampleRecord {
  uint64_t seed;
  uint64_t position;
  uint32_t stream;
  uint32_t selected;  // which selected row holds the logits; records come in order of it
  uint32_t history_begin, history_end, num_prompt;
  uint32_t bias_begin, bias_end;
  uint32_t banned_begin, banned_end;
  uint32_t top_k;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  uint32_t want_log_prob;
  uint32_t num_top;    // most likely tokens wanted, and where in `top_ids` and `top_log_probs` they go
  uint32_t first_top;
  uint32_t first_mask = kNoMask;  // word of `mask_words` with which the tokens begin that may be drawn
};

// A token that is known already, and whose log-prob is wanted: of a prompt.
struct ScoreRecord {
  uint32_t selected;  // which selected row holds the logits; records come in order of it
  int32_t token;
  uint32_t num_top;
  uint32_t first_top;
};
static_assert(sizeof(ChunkRecord) == 44 && sizeof(SampleRecord) == 96 && sizeof(ScoreRecord) == 16);

struct StepRecord {
  const int32_t* token_ids;
  const ChunkRecord* chunks;
  const int32_t* block_ids;
  const uint32_t* selected_rows;  // token rows whose logits are computed
  const uint32_t* kept_rows;      // which of the selected rows come back whole, in order
  const SampleRecord* samples;
  const ScoreRecord* scores;
  const int32_t* sample_ids;
  const float* bias_values;
  const uint32_t* mask_words;  // a bit for each token id, the lowest bits first
  const float* hidden;      // [num_tokens, hidden_width]: what kWithHidden puts beside x; null for a program without it
  const uint32_t* masks_ready;  // when not 0: see llmserve_signal. Until then the step goes on to its logits; null: they are
  int32_t* tokens;    // out, one per sample
  double* log_probs;  // out, one per sample
  double* score_log_probs;  // out, one per score
  int32_t* top_ids;         // out, of samples and scores
  double* top_log_probs;
  float* logits;            // out, [num_kept, width of the last operation]
  float* hidden_out;        // out, [num_tokens, hidden_width]: what the head would read of each; null: it is not wanted
  uint64_t hidden_width;
  uint32_t num_tokens;
  uint32_t num_chunks;
  uint32_t num_block_ids;
  uint32_t num_selected;
  uint32_t num_kept;
  uint32_t num_samples;
  uint32_t num_scores;
  uint32_t num_sample_ids;
  uint32_t num_top;
  uint32_t num_mask_words;
};
static_assert(sizeof(StepRecord) == 200);

// Whether what the step wants of its logits stays inside the step.
Error check_requests(const StepRecord& step, uint32_t vocab_size);

struct CacheLimits {
  uint32_t num_blocks;
  uint32_t num_states;
  uint32_t num_tables;  // of a sequence
};

// Whether the step stays inside the engine's limits and memory.
Error check_step(const StepRecord& step, const FileHeader& header, const CacheLimits& limits);

}  // namespace llmserve
