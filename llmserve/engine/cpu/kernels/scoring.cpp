#include "scoring.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "draw.h"

namespace llmserve {

Scorer::Scorer(const KernelTable& kernels, size_t vocab_size)
    : kernels_(kernels),
      vocab_size_(vocab_size),
      peaks_((vocab_size + kVocabularyBlock - 1) / kVocabularyBlock),
      block_weights_(peaks_.size()) {}

double Scorer::score(const float* logits, int32_t token, std::span<int32_t> top_ids, double* top_log_probs) {
  kernels_.block_peaks(logits, vocab_size_, peaks_.data());
  const float peak = *std::max_element(peaks_.begin(), peaks_.end());
  double sum = 0.0;
  if (peak != kNever) {
    kernels_.block_weights(logits, vocab_size_, {peak, 1.0f}, block_weights_.data());
    for (double weight : block_weights_) sum += weight;
  }
  const double log_sum = std::log(sum);
  const auto log_prob = [&](float logit) {
    return peak == kNever ? static_cast<double>(kNever) : static_cast<double>(logit) - peak - log_sum;
  };
  if (!top_ids.empty()) find_top(logits, top_ids.size());
  for (size_t i = 0; i < top_ids.size(); ++i) {
    top_ids[i] = candidates_[i].id;
    top_log_probs[i] = log_prob(candidates_[i].logit);
  }
  return log_prob(cleaned(logits[token]));
}

// Fills `candidates_`, whose first `count` are the most likely tokens. Searches only blocks whose peak is among the
// `count` largest peaks: at least `count` tokens are as likely as the last of these peaks.
void Scorer::find_top(const float* logits, size_t count) {
  float least = kNever;
  if (count <= peaks_.size()) {
    ranked_ = peaks_;
    const auto place = ranked_.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    std::nth_element(ranked_.begin(), place, ranked_.end(), std::greater());
    least = *place;
  }
  candidates_.clear();
  for (size_t block = 0; block < peaks_.size(); ++block) {
    if (peaks_[block] < least) continue;
    const size_t begin = block * kVocabularyBlock, end = std::min(begin + kVocabularyBlock, vocab_size_);
    for (size_t i = begin; i < end; ++i) {
      if (const float logit = cleaned(logits[i]); logit >= least) candidates_.push_back({logit, static_cast<int32_t>(i)});
    }
  }
  const auto place = candidates_.begin() + static_cast<std::ptrdiff_t>(count);
  std::partial_sort(candidates_.begin(), place, candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
}

}  // namespace llmserve
