// One planned step as flat arrays, which `step.py` fills from a StepPlan, and the checks that make it safe to run.
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
  uint32_t first_block;  // index into block_ids, where the sequence's tables follow one another
  uint32_t num_blocks;   // blocks of each table
  uint32_t state_before;  // slot of the sequence's state before the chunk; not read if `start` is 0
  uint32_t state_after;   // slot of its state after the chunk; may be the same
  uint32_t state_kept;    // slot of the state after `num_kept` tokens, fewer than all: a third one, or state_before
  uint32_t num_kept;      // 0: no such state is kept
  uint32_t second_segment;  // position of the first token of a second text; 0: there is only one text
  uint32_t adapter;      // slot of its adapter (adapters.h); 0: none
};

constexpr uint32_t kNoMask = UINT32_MAX;
constexpr uint32_t kMaskBits = 32;  // bits of a word of a mask

// One draw. Several draws of one chunk are several records, each with its own position and history. Ranges [begin, end)
// index `sample_ids`. Biases are ids there, with their values at the same index of `bias_values`.
struct SampleRecord {
  uint64_t seed;
  uint64_t position;
  uint32_t stream;
  uint32_t selected;  // the selected row of the logits; records are sorted by it
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
  uint32_t num_top;    // number of most likely tokens to return, and their first index in `top_ids` and `top_log_probs`
  uint32_t first_top;
  uint32_t first_mask = kNoMask;  // first word of `mask_words` of the tokens that may be drawn
};

// A known token, such as one of a prompt, whose log-prob is requested.
struct ScoreRecord {
  uint32_t selected;  // the selected row of the logits; records are sorted by it
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
  const uint32_t* kept_rows;      // the selected rows that are returned whole, in order
  const SampleRecord* samples;
  const ScoreRecord* scores;
  const int32_t* sample_ids;
  const float* bias_values;
  const uint32_t* mask_words;  // a bit for each token id, the lowest bits first
  const float* hidden;      // [num_tokens, hidden_width]: what kWithHidden appends to x; null for a program without it
  const uint32_t* masks_ready;  // not null: the step waits before its logits until this is not 0 (llmserve_signal)
  int32_t* tokens;    // out, one per sample
  double* log_probs;  // out, one per sample
  double* score_log_probs;  // out, one per score
  int32_t* top_ids;         // out, for samples and scores
  double* top_log_probs;
  float* logits;            // out, [num_kept, width of the last operation]
  float* hidden_out;        // out, [num_tokens, hidden_width]: the head's input for each token; null: not requested
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

// Checks that the requests for logits refer to data inside the step. `vocab_size`: the number of logits.
Error check_requests(const StepRecord& step, uint32_t vocab_size);

struct CacheLimits {
  uint32_t num_blocks;
  uint32_t num_states;
  uint32_t num_tables;  // tables of a sequence
};

// Checks that the step is inside the engine's limits and memory.
Error check_step(const StepRecord& step, const FileHeader& header, uint32_t num_logits, const CacheLimits& limits);

}  // namespace llmserve
