#include "step.h"

#include <algorithm>
#include <string>

namespace llmserve {
namespace {

bool in_range(int32_t value, uint32_t end) { return value >= 0 && static_cast<uint32_t>(value) < end; }

Error check_ids(const int32_t* ids, uint32_t count, uint32_t end, const char* what) {
  for (uint32_t i = 0; i < count; ++i) {
    if (!in_range(ids[i], end)) {
      return invalid(std::string(what) + " " + std::to_string(ids[i]) + " is not in [0, " + std::to_string(end) + ")");
    }
  }
  return {};
}

Error check_chunks(const StepRecord& step, const FileHeader& header, const CacheLimits& limits) {
  uint64_t next = 0;
  for (uint32_t i = 0; i < step.num_chunks; ++i) {
    const ChunkRecord& chunk = step.chunks[i];
    const uint64_t end = uint64_t{chunk.start} + chunk.num_tokens;
    if (chunk.first_token != next || chunk.num_tokens == 0) return invalid("chunks do not cover the tokens in order");
    next += chunk.num_tokens;
    if (end > header.max_seq_len) {
      return invalid("a sequence of " + std::to_string(end) + " tokens is longer than max_seq_len " +
                     std::to_string(header.max_seq_len));
    }
    if (end > uint64_t{chunk.num_blocks} * header.block_size ||
        chunk.first_block + uint64_t{chunk.num_blocks} * limits.num_tables > step.num_block_ids) {
      return invalid("a block table is too short for its sequence");
    }
    const uint32_t last_state = std::max({chunk.state_before, chunk.state_after, chunk.state_kept});
    if (limits.num_states > 0 && (last_state >= limits.num_states || chunk.num_kept >= chunk.num_tokens)) {
      return invalid("a state is outside of the " + std::to_string(limits.num_states) + " that there are");
    }
  }
  return next == step.num_tokens ? Error{} : invalid("chunks do not cover the tokens in order");
}

// Checks that `selected` of each record is below `end` and ascending, so that the records of a piece can be found.
template <class Record, class Fn>
bool in_order(const Record* records, uint32_t count, uint32_t end, Fn selected) {
  for (uint32_t i = 0; i < count; ++i) {
    if (selected(records[i]) >= end || (i > 0 && selected(records[i]) < selected(records[i - 1]))) return false;
  }
  return true;
}

Error check_selected(const StepRecord& step) {
  const auto of_record = [](const auto& record) { return record.selected; };
  if (!in_order(step.samples, step.num_samples, step.num_selected, of_record) ||
      !in_order(step.scores, step.num_scores, step.num_selected, of_record) ||
      !in_order(step.kept_rows, step.num_kept, step.num_selected, [](uint32_t row) { return row; })) {
    return invalid("a request for logits points outside of its step, or they are out of order");
  }
  return {};
}

bool top_inside(const StepRecord& step, uint32_t vocab_size, uint32_t num_top, uint32_t first_top) {
  return num_top <= vocab_size && uint64_t{first_top} + num_top <= step.num_top;
}

bool mask_inside(const StepRecord& step, uint32_t vocab_size, uint32_t first_mask) {
  const uint64_t words = (uint64_t{vocab_size} + kMaskBits - 1) / kMaskBits;
  return first_mask == kNoMask || first_mask + words <= step.num_mask_words;
}

Error check_scores(const StepRecord& step, uint32_t vocab_size) {
  for (uint32_t i = 0; i < step.num_scores; ++i) {
    const ScoreRecord& s = step.scores[i];
    if (!in_range(s.token, vocab_size) || !top_inside(step, vocab_size, s.num_top, s.first_top)) {
      return invalid("a score request points outside of its step");
    }
  }
  return {};
}

Error check_samples(const StepRecord& step, uint32_t vocab_size) {
  const auto inside = [&](uint32_t begin, uint32_t end) { return begin <= end && end <= step.num_sample_ids; };
  for (uint32_t i = 0; i < step.num_samples; ++i) {
    const SampleRecord& s = step.samples[i];
    if (!top_inside(step, vocab_size, s.num_top, s.first_top) || !mask_inside(step, vocab_size, s.first_mask) ||
        !inside(s.history_begin, s.history_end) ||
        !inside(s.bias_begin, s.bias_end) || !inside(s.banned_begin, s.banned_end) ||
        s.num_prompt > s.history_end - s.history_begin) {
      return invalid("a sample request points outside of its step");
    }
    if (!(s.temperature >= 0.0f)) return invalid("a sample request has no temperature");
  }
  return {};
}

}  // namespace

Error check_requests(const StepRecord& step, uint32_t vocab_size) {
  if (Error error = check_selected(step)) return error;
  if (Error error = check_samples(step, vocab_size)) return error;
  if (Error error = check_scores(step, vocab_size)) return error;
  return check_ids(step.sample_ids, step.num_sample_ids, vocab_size, "token id of a sample request");
}

Error check_step(const StepRecord& step, const FileHeader& header, uint32_t num_logits, const CacheLimits& limits) {
  if (step.num_tokens == 0 || step.num_tokens > header.max_num_tokens) {
    return invalid("a step of " + std::to_string(step.num_tokens) + " tokens; the engine takes 1 to " +
                   std::to_string(header.max_num_tokens));
  }
  if (step.num_chunks > header.max_batch_size) {
    return invalid("a step of " + std::to_string(step.num_chunks) + " chunks; the engine takes at most " +
                   std::to_string(header.max_batch_size));
  }
  if (step.num_selected > step.num_tokens || step.num_samples > step.num_selected) {
    return invalid("a step selects more rows than it has");
  }
  for (uint32_t i = 0; i < step.num_selected; ++i) {
    if (step.selected_rows[i] >= step.num_tokens) return invalid("a selected row is outside of the step");
  }
  if (Error error = check_chunks(step, header, limits)) return error;
  if (Error error = check_requests(step, num_logits)) return error;
  if (Error error = check_ids(step.token_ids, step.num_tokens, header.vocab_size, "token id")) return error;
  return check_ids(step.block_ids, step.num_block_ids, limits.num_blocks, "block");
}

}  // namespace llmserve
