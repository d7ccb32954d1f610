// Samples one token from one row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "draw.h"
#include "kernels.h"
#include "step.h"

namespace llmserve {

// Order: repetition, presence and frequency penalties; bias; bans; the mask; then greedy, or temperature, top-k, top-p,
// min-p and one draw. A logit that is not finite never wins: NaN counts as minus infinity, plus infinity as the largest
// float. If no token is left, bans are ignored, but the mask is not, unless it allows no token. If there is still no
// token, the lowest id that the mask allows is taken.
class Sampler {
 public:
  Sampler(const KernelTable& kernels, size_t vocab_size);

  int32_t sample(const float* logits, const StepRecord& step, const SampleRecord& request);

 private:
  struct Best {
    float logit;  // minus infinity: none
    int32_t id;   // the lowest id with the largest logit
  };

  const float* adjust(const float* logits, const StepRecord& step, const SampleRecord& request);
  void apply_mask(const StepRecord& step, const SampleRecord& request);
  int32_t without_bans(const float* logits, const StepRecord& step, const SampleRecord& request);
  void penalize(const StepRecord& step, const SampleRecord& request);
  Best best(const float* logits);

  const KernelTable& kernels_;
  Draw draw_;
  std::vector<float> adjusted_;         // a copy of the logits, if a request changes some
  std::vector<uint32_t> counts_;        // count of each token in the answer so far; zero between calls
  std::vector<float> peaks_;            // peak of each block of the logits
};

}  // namespace llmserve
