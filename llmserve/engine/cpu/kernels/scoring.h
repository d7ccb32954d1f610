// Scores tokens with a row of logits: their log-probs, and the most likely tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels.h"

namespace llmserve {

// Works on the unmodified logits: NaN counts as minus infinity, plus infinity as the largest float.
class Scorer {
 public:
  Scorer(const KernelTable& kernels, size_t vocab_size);

  // Returns the natural logarithm of the probability of `token`. Fills `top_ids` with the most likely tokens, best
  // first, ties by id, and `top_log_probs` with theirs. The size of `top_ids` is at most the vocabulary's.
  double score(const float* logits, int32_t token, std::span<int32_t> top_ids, double* top_log_probs);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  void find_top(const float* logits, size_t count);

  const KernelTable& kernels_;
  const size_t vocab_size_;
  std::vector<float> peaks_;  // peak of each block of the logits
  std::vector<float> ranked_;
  std::vector<double> block_weights_;
  std::vector<Candidate> candidates_;
};

}  // namespace llmserve
