// Passes over a row of logits, which may have 125,696 columns: peaks and weights of each block. Every variant computes
// the same bits, so that equal logits give equal tokens and log-probs everywhere.
#include <algorithm>
#include <limits>

#include "simd.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

static_assert(kVocabularyBlock == 4 * kLanes);

// Returns x; NaN becomes minus infinity, plus infinity the largest float.
inline F32x16 cleaned(F32x16 x) {
  return min(max(x, broadcast(-std::numeric_limits<float>::infinity())),
             broadcast(std::numeric_limits<float>::max()));
}

inline F32x16 weight(F32x16 x, F32x16 peak, F32x16 temperature) { return exp_same((cleaned(x) - peak) / temperature); }

inline float peak_of_block(const float* x) {
  const F32x16 low = max(cleaned(load(x)), cleaned(load(x + kLanes)));
  const F32x16 high = max(cleaned(load(x + 2 * kLanes)), cleaned(load(x + 3 * kLanes)));
  return reduce_max(max(low, high)) + 0.0f;  // +0 instead of -0
}

inline double weight_of_block(const float* x, F32x16 peak, F32x16 temperature) {
  const F32x16 low = weight(load(x), peak, temperature) + weight(load(x + kLanes), peak, temperature);
  const F32x16 high = weight(load(x + 2 * kLanes), peak, temperature) + weight(load(x + 3 * kLanes), peak, temperature);
  return static_cast<double>(reduce_add(low + high));
}

// Calls fn(block, index) for each block. The last one is padded with minus infinity, whose weight is nearly 0.
template <class Fn>
inline void for_blocks(const float* x, size_t count, Fn fn) {
  const size_t num_whole = count / kVocabularyBlock, begin = num_whole * kVocabularyBlock;
  for (size_t i = 0; i < num_whole; ++i) fn(x + i * kVocabularyBlock, i);
  if (begin == count) return;
  float rest[kVocabularyBlock];
  std::fill(std::copy(x + begin, x + count, rest), rest + kVocabularyBlock, -std::numeric_limits<float>::infinity());
  fn(rest, num_whole);
}

}  // namespace

void block_peaks(const float* x, size_t count, float* peaks) {
  for_blocks(x, count, [&](const float* block, size_t i) { peaks[i] = peak_of_block(block); });
}

void block_weights(const float* x, size_t count, Softmax softmax, double* sums) {
  const F32x16 peak = broadcast(softmax.peak), temperature = broadcast(softmax.temperature);
  for_blocks(x, count, [&](const float* block, size_t i) { sums[i] = weight_of_block(block, peak, temperature); });
}

void weights(const float* x, size_t count, Softmax softmax, float* y) {
  const F32x16 peak = broadcast(softmax.peak), temperature = broadcast(softmax.temperature);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, weight(load(x + i), peak, temperature));
  if (i < count) store_partial(y + i, weight(load_partial(x + i, count - i), peak, temperature), count - i);
}

}  // namespace llmserve::LLMSERVE_VARIANT
