// Operations on one row that several kernels share.
#pragma once

#include "simd.h"

namespace llmserve::LLMSERVE_VARIANT {

// Calls full(index) for every full vector, then rest(index, count) for the remaining elements.
template <class Full, class Rest>
[[gnu::always_inline]] inline void for_lanes(size_t width, Full full, Rest rest) {
  size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) full(i);
  if (i < width) rest(i, width - i);
}

// Squashes x smoothly into [-cap, cap].
inline F32x16 soft_capped(F32x16 x, float cap) { return broadcast(cap) * tanh(x / broadcast(cap)); }

// Rotates the pairs (i, i + half) by the angle of i. `table`: half cosines, then half sines. y may be x.
inline void rotate(const float* x, const float* table, size_t half, float* y) {
  const float* sines = table + half;
  for_lanes(
      half,
      [&](size_t i) {
        const F32x16 a = load(x + i), b = load(x + half + i), c = load(table + i), s = load(sines + i);
        store(y + i, a * c - b * s);
        store(y + half + i, b * c + a * s);
      },
      [&](size_t i, size_t n) {
        const F32x16 a = load_partial(x + i, n), b = load_partial(x + half + i, n);
        const F32x16 c = load_partial(table + i, n), s = load_partial(sines + i, n);
        store_partial(y + i, a * c - b * s, n);
        store_partial(y + half + i, b * c + a * s, n);
      });
}

// Rotates the first `rotary_dim` elements of one head and copies the others. y may not be x.
inline void rotate_head(const float* x, const float* table, size_t rotary_dim, size_t head_dim, float* y) {
  rotate(x, table, rotary_dim / 2, y);
  __builtin_memcpy(y + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(float));
}

// y = round(x / scale); returns scale = max |x| / 127.
inline float quantize_row(const float* x, size_t width, int8_t* y) {
  F32x16 largest = zero();
  for_lanes(
      width, [&](size_t i) { largest = max(largest, abs(load(x + i))); },
      [&](size_t i, size_t n) { largest = max(largest, abs(load_partial(x + i, n))); });
  const float peak = reduce_max(largest);
  const F32x16 inverse = broadcast(peak > 0.0f ? 127.0f / peak : 0.0f);
  for_lanes(
      width, [&](size_t i) { store_i8(y + i, load(x + i) * inverse); },
      [&](size_t i, size_t n) {
        int8_t lanes[kLanes];
        store_i8(lanes, load_partial(x + i, n) * inverse);
        __builtin_memcpy(y + i, lanes, n);
      });
  return peak / 127.0f;
}

template <size_t kCount = 0>
inline int32_t sum_of(const int8_t* values, size_t count = kCount) {
  int32_t sum = 0;
  for (size_t i = 0; i < (kCount ? kCount : count); ++i) sum += values[i];
  return sum;
}

// Quantizes a row with one scale for each group. Pads y with zeros to a multiple of four, so that padding adds nothing
// to products. `offsets`: -zero_point (of the other factor) times the sum of a group's values. `halves`: the same for
// the first half of each group; may be null.
inline void quantize_groups(const float* x, size_t width, int32_t zero_point, int8_t* y, float* scales, int32_t* offsets,
                            int32_t* halves = nullptr) {
  for (size_t begin = 0, group = 0; begin < width; begin += kQuantizedGroup, ++group) {
    const size_t count = width - begin < kQuantizedGroup ? width - begin : kQuantizedGroup;
    scales[group] = quantize_row(x + begin, count, y + begin);
    const size_t half = count < kHalfGroup ? count : kHalfGroup;
    const int32_t of_half = half == kHalfGroup ? sum_of<kHalfGroup>(y + begin) : sum_of(y + begin, half);
    const int32_t of_rest = count == kQuantizedGroup ? sum_of<kHalfGroup>(y + begin + half)
                                                     : sum_of(y + begin + half, count - half);
    if (halves) halves[group] = -zero_point * of_half;
    offsets[group] = -zero_point * (of_half + of_rest);
  }
  for (size_t i = width; i % 4 != 0; ++i) y[i] = 0;
}

}  // namespace llmserve::LLMSERVE_VARIANT
