// Answers a step's requests for logits, computed here or elsewhere: tokens, log-probs, and the logits themselves.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "error.h"
#include "kernels.h"
#include "sampling.h"
#include "scoring.h"
#include "step.h"
#include "thread_pool.h"

namespace llmserve {

// Logits of the selected rows [begin, begin + num_rows) of a step.
struct LogitsPiece {
  const float* logits;
  size_t begin;
  size_t num_rows;
  size_t vocab_size;

  const float* row(uint32_t selected) const { return logits + (selected - begin) * vocab_size; }
};

// The requests that can be answered from a piece of the logits.
struct Wanted {
  std::span<const SampleRecord> samples;
  std::span<const ScoreRecord> scores;
  std::span<const uint32_t> kept;

  size_t size() const { return samples.size() + scores.size() + kept.size(); }
};

Wanted wanted_of(const StepRecord& step, const LogitsPiece& piece);

// Waits until the masks of the step are ready. Other threads, which need a core too, compute them during the step, so
// the wait is a sleep, not a spin.
void wait_for_masks(const StepRecord& step);

// Answers requests on one thread.
class Chooser {
 public:
  Chooser(const KernelTable& kernels, size_t vocab_size) : sampler_(kernels, vocab_size), scorer_(kernels, vocab_size) {}

  // Answers request number `index` of `wanted`.
  void answer(const StepRecord& step, const LogitsPiece& piece, const Wanted& wanted, size_t index);

 private:
  void sample(const StepRecord& step, const float* row, const SampleRecord& request);

  Sampler sampler_;
  Scorer scorer_;
};

// Answers requests for logits that were computed elsewhere, with its own threads.
class ChooserPool {
 public:
  // Throws std::system_error and std::bad_alloc.
  ChooserPool(const KernelTable& kernels, size_t vocab_size, unsigned num_threads);

  // One caller at a time.
  Error choose(const StepRecord& step, const float* logits, size_t begin, size_t num_rows);

 private:
  const size_t vocab_size_;
  ThreadPool threads_;
  TaskCounter tasks_;
  std::vector<Chooser> choosers_;
};

}  // namespace llmserve
