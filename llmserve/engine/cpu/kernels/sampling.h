// From one row of logits to one token.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "step.h"

namespace llmserve {

// Order: repetition, presence and frequency penalties; bias; bans; then greedy, or temperature, top-k, top-p, min-p and
// one draw. A number that is not finite never wins: NaN counts as minus infinity, plus infinity as the largest float.
// When nothing is left to choose from, bans are ignored; when even then nothing is left, the lowest id is taken.
class Sampler {
 public:
  Sampler(const KernelTable& kernels, size_t vocab_size);

  int32_t sample(const float* logits, const StepRecord& step, const SampleRecord& request);

  // Natural logarithm of the probability of `token` under the unmodified logits.
  double log_prob(const float* logits, int32_t token);

 private:
  struct Candidate {
    float value;  // logit / temperature, the largest at 0
    int32_t id;
  };

  void adjust(const float* logits, const StepRecord& step, const SampleRecord& request);
  void penalize(const StepRecord& step, const SampleRecord& request);
  int32_t draw(const SampleRecord& request);
  void collect(const SampleRecord& request);
  void keep_nucleus(float top_p);
  void sort_first(size_t count);

  const KernelTable& kernels_;
  std::vector<float> logits_;      // adjusted
  std::vector<uint32_t> counts_;   // of each token in the history; zero between calls
  std::vector<Candidate> candidates_;
};

// A number in [0, 1) that depends on its arguments only (Philox 4x32-10).
double uniform(uint64_t seed, uint64_t position, uint32_t stream);

}  // namespace llmserve
