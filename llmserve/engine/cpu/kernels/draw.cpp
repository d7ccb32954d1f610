#include "draw.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

namespace llmserve {

float cleaned(float logit) {
  return std::isnan(logit) ? kNever : std::min(logit, std::numeric_limits<float>::max());
}

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

int32_t Draw::choose(const Logits& logits, float peak, int32_t best, const SampleRecord& request) {
  logits_ = logits;
  softmax_ = {peak, request.temperature};
  const double draw = uniform(request.seed, request.position, request.stream);
  const bool has_top_k = request.top_k > 0 && request.top_k < logits.count;
  const bool has_top_p = request.top_p < 1.0f, has_min_p = request.min_p > 0.0f;
  if (!has_top_k && !has_top_p && !has_min_p) return from_blocks(draw, best);
  // computed in double, so that no C library rounds it differently; at most 0, so that the best token stays
  const float least = has_min_p ? static_cast<float>(std::min(0.0, std::log(double{request.min_p}))) : kNever;
  if (has_top_k) {
    keep_top(request.top_k);
    if (has_top_p) cut_nucleus(static_cast<double>(request.top_p) * weigh());
  } else if (has_top_p) {
    find_nucleus(request.top_p);
  } else {
    collect(least);
  }
  std::erase_if(candidates_, [&](const Candidate& c) { return c.value < least; });
  return from_candidates(draw);
}

// Collects the tokens with at least this value, in ascending order of ids.
void Draw::collect(float least) {
  candidates_.clear();
  for (size_t block = 0; block < logits_.num_blocks; ++block) {
    if (value(logits_.peaks[block]) < least) continue;
    const size_t begin = block * kVocabularyBlock, end = std::min(begin + kVocabularyBlock, logits_.count);
    for (size_t i = begin; i < end; ++i) {
      const float v = value(logits_.x[i]);
      if (v > kNever && v >= least) candidates_.push_back({v, static_cast<int32_t>(i)});
    }
  }
}

// Returns the value of the block peak with this rank, 1 for the largest. At least `rank` tokens reach this value.
float Draw::peak_value(size_t rank) {
  if (rank > logits_.num_blocks) return kNever;
  ranked_.assign(logits_.peaks, logits_.peaks + logits_.num_blocks);
  const auto place = ranked_.begin() + static_cast<std::ptrdiff_t>(rank) - 1;
  std::nth_element(ranked_.begin(), place, ranked_.end(), std::greater());
  return value(*place);
}

// Keeps the `count` largest, including ties with the last one, in ascending order of ids.
void Draw::keep_top(size_t count) {
  collect(peak_value(count));
  if (count >= candidates_.size()) return;
  ranked_.resize(candidates_.size());
  std::transform(candidates_.begin(), candidates_.end(), ranked_.begin(), [](const Candidate& c) { return c.value; });
  const auto place = ranked_.begin() + static_cast<std::ptrdiff_t>(count) - 1;
  std::nth_element(ranked_.begin(), place, ranked_.end(), std::greater());
  std::erase_if(candidates_, [least = *place](const Candidate& c) { return c.value < least; });
}

// Finds the most probable tokens that together reach `top_p`, sorted. Searches few blocks first, which mostly suffice.
void Draw::find_nucleus(float top_p) {
  const double wanted = static_cast<double>(top_p) * sum_blocks();
  for (size_t num_blocks = 32;; num_blocks *= 16) {
    const float least = peak_value(num_blocks);
    collect(least);
    if (cut_nucleus(wanted) || least == kNever) return;
  }
}

// Sorts the candidates and keeps the first ones that together weigh `wanted`, at least one. Returns false if the sum of
// all is less than that.
bool Draw::cut_nucleus(double wanted) {
  sort();
  weigh();
  double sum = 0.0;
  size_t kept = 0;
  while (kept < candidates_.size() && sum < wanted) sum += static_cast<double>(weights_[kept++]);
  candidates_.resize(std::max<size_t>(kept, 1));
  return sum >= wanted;
}

// Sorts by descending value, ties by id. Candidates come in order of ids, so a stable sort by value suffices. Many are
// sorted by radix, since there may be as many as the vocabulary has tokens.
void Draw::sort() {
  constexpr unsigned kBits = 11, kBins = 1u << kBits;
  if (candidates_.size() < kBins) {
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.value > b.value || (a.value == b.value && a.id < b.id);
    });
    return;
  }
  sorted_.resize(candidates_.size());
  for (unsigned shift = 0; shift < 32; shift += kBits) {
    // no value is positive, so with the sign removed a larger number is a smaller value
    const auto bin = [=](const Candidate& c) {
      return ((std::bit_cast<uint32_t>(c.value) & 0x7fffffffu) >> shift) & (kBins - 1);
    };
    std::array<uint32_t, kBins + 1> begins{};
    for (const Candidate& c : candidates_) ++begins[bin(c) + 1];
    for (unsigned i = 0; i < kBins; ++i) begins[i + 1] += begins[i];
    for (const Candidate& c : candidates_) sorted_[begins[bin(c)]++] = c;
    candidates_.swap(sorted_);
  }
}

// Fills `weights_` and returns their sum.
double Draw::weigh() {
  weights_.resize(candidates_.size());
  std::transform(candidates_.begin(), candidates_.end(), weights_.begin(), [](const Candidate& c) { return c.value; });
  kernels_.weights(weights_.data(), weights_.size(), {0.0f, 1.0f}, weights_.data());
  double total = 0.0;
  for (float weight : weights_) total += static_cast<double>(weight);
  return total;
}

double Draw::sum_blocks() {
  block_weights_.resize(logits_.num_blocks);
  kernels_.block_weights(logits_.x, logits_.count, softmax_, block_weights_.data());
  double total = 0.0;
  for (double weight : block_weights_) total += weight;
  return total;
}

int32_t Draw::from_candidates(double draw) {
  double left = draw * weigh();
  for (size_t i = 0; i < candidates_.size(); ++i) {
    left -= static_cast<double>(weights_[i]);
    if (left < 0.0) return candidates_[i].id;
  }
  return candidates_.back().id;  // rounding used up the draw
}

// Draws from all tokens, in order of ids: finds the block first, then the token in it.
int32_t Draw::from_blocks(double draw, int32_t best) {
  double left = draw * sum_blocks();
  int32_t last = best;  // the last token seen that can be drawn
  for (size_t block = 0; block < logits_.num_blocks; ++block) {
    if (left >= block_weights_[block] && block + 1 < logits_.num_blocks) {
      left -= block_weights_[block];
      continue;
    }
    const size_t begin = block * kVocabularyBlock, count = std::min(kVocabularyBlock, logits_.count - begin);
    float weights[kVocabularyBlock];
    kernels_.weights(logits_.x + begin, count, softmax_, weights);
    for (size_t i = 0; i < count; ++i) {
      if (value(logits_.x[begin + i]) == kNever) continue;
      last = static_cast<int32_t>(begin + i);
      left -= static_cast<double>(weights[i]);
      if (left < 0.0) return last;
    }
  }
  return last;  // rounding used up the draw
}

}  // namespace llmserve
