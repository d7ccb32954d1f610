// What a row of logits says about tokens: their log-probs, and which are the most likely.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels.h"

namespace llmserve {

// Of the unmodified logits: NaN counts as minus infinity, plus infinity as the largest float.
class Scorer {
 public:
  Scorer(const KernelTable& kernels, size_t vocab_size);

  // Natural logarithm of the probability of `token`, and of the most likely tokens, which fill `top_ids`: the best first,
  // of equal ones the lower id. No more of them than the vocabulary has.
  double score(const float* logits, int32_t token, std::span<int32_t> top_ids, double* top_log_probs);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  void find_top(const float* logits, size_t count);

  const KernelTable& kernels_;
  const size_t vocab_size_;
  std::vector<float> peaks_;  // of each block of the logits
  std::vector<float> ranked_;
  std::vector<double> block_weights_;
  std::vector<Candidate> candidates_;
};

}  // namespace llmserve
