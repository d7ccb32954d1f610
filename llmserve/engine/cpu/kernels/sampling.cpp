#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace llmserve {
namespace {

bool is_allowed(const uint32_t* mask, size_t id) { return mask[id / kMaskBits] >> (id % kMaskBits) & 1u; }

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
  apply_mask(step, request);
  const Best found = best(row);
  if (found.logit == kNever) return without_bans(logits, step, request);
  if (request.temperature == 0.0f || request.top_k == 1) return found.id;
  return draw_.choose({row, adjusted_.size(), peaks_.data(), peaks_.size()}, found.logit, found.id, request);
}

int32_t Sampler::without_bans(const float* logits, const StepRecord& step, const SampleRecord& request) {
  const float* row = adjust(logits, step, request);
  apply_mask(step, request);
  const Best found = best(row);
  if (found.logit != kNever || request.first_mask == kNoMask) return found.id;
  for (size_t id = 0; id < adjusted_.size(); ++id) {
    if (is_allowed(step.mask_words + request.first_mask, id)) return static_cast<int32_t>(id);
  }
  return 0;
}

// Returns the logits with penalties and bias: the row itself if the request changes nothing, bans and mask included,
// else the copy.
const float* Sampler::adjust(const float* logits, const StepRecord& step, const SampleRecord& request) {
  const bool penalizes = request.history_begin != request.history_end;
  const bool forbids = request.banned_begin != request.banned_end || request.first_mask != kNoMask;
  if (!penalizes && request.bias_begin == request.bias_end && !forbids) return logits;
  std::copy(logits, logits + adjusted_.size(), adjusted_.begin());
  if (penalizes) penalize(step, request);
  for (uint32_t i = request.bias_begin; i < request.bias_end; ++i) {
    float& logit = adjusted_[static_cast<size_t>(step.sample_ids[i])];
    logit = cleaned(cleaned(logit) + step.bias_values[i]);
  }
  return adjusted_.data();
}

void Sampler::apply_mask(const StepRecord& step, const SampleRecord& request) {
  if (request.first_mask == kNoMask) return;
  const uint32_t* mask = step.mask_words + request.first_mask;
  for (size_t begin = 0; begin < adjusted_.size(); begin += kMaskBits) {
    const uint32_t word = mask[begin / kMaskBits];
    const size_t end = std::min<size_t>(begin + kMaskBits, adjusted_.size());
    if (word == 0) {  // as in most words of a mask
      std::fill_n(adjusted_.data() + begin, end - begin, kNever);
    } else if (word != UINT32_MAX) {
      for (size_t id = begin; id < end; ++id) {
        if (!is_allowed(mask, id)) adjusted_[id] = kNever;
      }
    }
  }
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

// Fills `peaks_`. The first block with the largest peak contains the lowest id.
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
