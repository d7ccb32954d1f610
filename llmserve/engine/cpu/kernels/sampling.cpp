#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace llmserve {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

}  // namespace

Sampler::Sampler(const KernelTable& kernels, size_t vocab_size)
    : kernels_(kernels),
      draw_(kernels),
      adjusted_(vocab_size),
      counts_(vocab_size),
      peaks_((vocab_size + kVocabularyBlock - 1) / kVocabularyBlock) {}

int32_t Sampler::sample(const float* logits, const StepRecord& step, const SampleRecord& request) {
  const std::span banned(step.sample_ids + request.banned_begin, step.sample_ids + request.banned_end);
  const float* row = adjust(logits, step, request);
  for (int32_t id : banned) adjusted_[static_cast<size_t>(id)] = kNever;
  const Best found = best(row);
  if (found.logit == kNever) return banned.empty() ? found.id : best(adjust(logits, step, request)).id;
  if (request.temperature == 0.0f || request.top_k == 1) return found.id;
  return draw_.choose({row, adjusted_.size(), peaks_.data(), peaks_.size()}, found.logit, found.id, request);
}

// The logits with penalties and bias: the row itself when the request alters nothing, bans included, else the copy.
const float* Sampler::adjust(const float* logits, const StepRecord& step, const SampleRecord& request) {
  const bool penalizes = request.history_begin != request.history_end;
  if (!penalizes && request.bias_begin == request.bias_end && request.banned_begin == request.banned_end) return logits;
  std::copy(logits, logits + adjusted_.size(), adjusted_.begin());
  if (penalizes) penalize(step, request);
  for (uint32_t i = request.bias_begin; i < request.bias_end; ++i) {
    float& logit = adjusted_[static_cast<size_t>(step.sample_ids[i])];
    logit = cleaned(cleaned(logit) + step.bias_values[i]);
  }
  return adjusted_.data();
}

void Sampler::penalize(const StepRecord& step, const SampleRecord& request) {
  constexpr uint32_t kSeen = 1u << 31;
  const std::span history(step.sample_ids + request.history_begin, step.sample_ids + request.history_end);
  for (int32_t id : history.subspan(request.num_prompt)) ++counts_[static_cast<size_t>(id)];
  for (int32_t id : history) {
    uint32_t& count = counts_[static_cast<size_t>(id)];
    if (count & kSeen) continue;
    float& logit = adjusted_[static_cast<size_t>(id)];
    logit = cleaned(logit);
    logit = logit > 0.0f ? logit / request.repetition_penalty : logit * request.repetition_penalty;
    if (count > 0) logit -= request.presence_penalty + static_cast<float>(count) * request.frequency_penalty;
    logit = cleaned(logit);
    count |= kSeen;
  }
  for (int32_t id : history) counts_[static_cast<size_t>(id)] = 0;
}

// Fills `peaks_`. The first block that has the largest peak has the lowest id.
Sampler::Best Sampler::best(const float* logits) {
  const size_t count = adjusted_.size();
  kernels_.block_peaks(logits, count, peaks_.data());
  const auto peak = std::max_element(peaks_.begin(), peaks_.end());
  if (*peak == kNever) return {kNever, 0};
  const size_t begin = static_cast<size_t>(peak - peaks_.begin()) * kVocabularyBlock;
  const float* end = logits + std::min(begin + kVocabularyBlock, count);
  const float* found = std::find_if(logits + begin, end, [&](float logit) { return logit >= *peak; });
  return {*peak, static_cast<int32_t>(found - logits)};
}

}  // namespace llmserve
