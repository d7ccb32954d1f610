#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace llmserve {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

float cleaned(float logit) { return std::isnan(logit) ? kNever : std::min(logit, kMost); }

// The lowest id among the largest.
size_t argmax(const std::vector<float>& values) {
  size_t best = 0;
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] > values[best]) best = i;
  }
  return best;
}

}  // namespace

double uniform(uint64_t seed, uint64_t position, uint32_t stream) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), stream, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, counter);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{counter[0]} << 32 | counter[1]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

Sampler::Sampler(const KernelTable& kernels, size_t vocab_size)
    : kernels_(kernels), logits_(vocab_size), counts_(vocab_size) {
  candidates_.reserve(vocab_size);
}

int32_t Sampler::sample(const float* logits, const StepRecord& step, const SampleRecord& request) {
  adjust(logits, step, request);
  const std::span banned(step.sample_ids + request.banned_begin, step.sample_ids + request.banned_end);
  const size_t unbanned_best = banned.empty() ? 0 : argmax(logits_);
  for (int32_t id : banned) logits_[static_cast<size_t>(id)] = kNever;
  const size_t best = argmax(logits_);
  if (logits_[best] == kNever) return static_cast<int32_t>(unbanned_best);
  if (request.temperature == 0.0f || request.top_k == 1) return static_cast<int32_t>(best);
  return draw(request);
}

double Sampler::log_prob(const float* logits, int32_t token) {
  const size_t count = logits_.size();
  float peak = kNever;
  for (size_t i = 0; i < count; ++i) {
    logits_[i] = cleaned(logits[i]);
    peak = std::max(peak, logits_[i]);
  }
  if (peak == kNever) return kNever;
  const double sum = kernels_.sum_exp(logits_.data(), count, peak);
  return static_cast<double>(logits_[static_cast<size_t>(token)]) - peak - std::log(sum);
}

void Sampler::adjust(const float* logits, const StepRecord& step, const SampleRecord& request) {
  std::transform(logits, logits + logits_.size(), logits_.begin(), cleaned);
  if (request.history_begin != request.history_end) penalize(step, request);
  for (uint32_t i = request.bias_begin; i < request.bias_end; ++i) {
    float& logit = logits_[static_cast<size_t>(step.sample_ids[i])];
    logit = cleaned(logit + step.bias_values[i]);
  }
}

void Sampler::penalize(const StepRecord& step, const SampleRecord& request) {
  constexpr uint32_t kSeen = 1u << 31;
  const std::span history(step.sample_ids + request.history_begin, step.sample_ids + request.history_end);
  for (int32_t id : history.subspan(request.num_prompt)) ++counts_[static_cast<size_t>(id)];
  for (int32_t id : history) {
    uint32_t& count = counts_[static_cast<size_t>(id)];
    if (count & kSeen) continue;
    float& logit = logits_[static_cast<size_t>(id)];
    logit = logit > 0.0f ? logit / request.repetition_penalty : logit * request.repetition_penalty;
    if (count > 0) logit -= request.presence_penalty + static_cast<float>(count) * request.frequency_penalty;
    logit = cleaned(logit);
    count |= kSeen;
  }
  for (int32_t id : history) counts_[static_cast<size_t>(id)] = 0;
}

int32_t Sampler::draw(const SampleRecord& request) {
  collect(request);
  if (request.top_p < 1.0f) keep_nucleus(request.top_p);
  if (request.min_p > 0.0f) {
    const float least = std::log(request.min_p);
    std::erase_if(candidates_, [&](const Candidate& c) { return c.value < least; });
  }
  double total = 0.0;
  for (const Candidate& c : candidates_) total += std::exp(static_cast<double>(c.value));
  double left = uniform(request.seed, request.position, request.stream) * total;
  for (const Candidate& c : candidates_) {
    left -= std::exp(static_cast<double>(c.value));
    if (left < 0.0) return c.id;
  }
  return candidates_.back().id;  // rounding used up the draw
}

// Candidates in order of ids: those that top-k leaves, ties with the last one included.
void Sampler::collect(const SampleRecord& request) {
  const float peak = logits_[argmax(logits_)];
  candidates_.clear();
  for (size_t i = 0; i < logits_.size(); ++i) {
    const float value = (logits_[i] - peak) / request.temperature;
    if (value > kNever) candidates_.push_back({value, static_cast<int32_t>(i)});
  }
  if (request.top_k == 0 || request.top_k >= candidates_.size()) return;
  const size_t num_kept = request.top_k;
  sort_first(num_kept);
  const float least = candidates_[num_kept - 1].value;
  std::erase_if(candidates_, [&](const Candidate& c) { return c.value < least; });
  std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
}

// The most probable tokens that together reach `top_p`, sorted; at least one.
void Sampler::keep_nucleus(float top_p) {
  double total = 0.0;
  for (const Candidate& c : candidates_) total += std::exp(static_cast<double>(c.value));
  const double wanted = static_cast<double>(top_p) * total;
  double sum = 0.0;
  size_t kept = 0;
  for (size_t sorted = 0; kept < candidates_.size() && sum < wanted; ++kept) {
    if (kept == sorted) {
      sorted = std::min(candidates_.size(), std::max<size_t>(64, sorted * 8));
      sort_first(sorted);
    }
    sum += std::exp(static_cast<double>(candidates_[kept].value));
  }
  candidates_.resize(std::max<size_t>(kept, 1));
}

// The `count` largest first, in order; equal ones by id.
void Sampler::sort_first(size_t count) {
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  };
  const auto middle = candidates_.begin() + static_cast<std::ptrdiff_t>(count);
  if (middle != candidates_.end()) std::nth_element(candidates_.begin(), middle, candidates_.end(), before);
  std::sort(candidates_.begin(), middle, before);
}

}  // namespace llmserve
