// F32x16, sixteen floats, in the registers of the variant: one of 512 bits, two of 256, or four of 128.
//
// Every variant has sixteen lanes and the same reduction tree, which fixes the order of every sum. Lanes fold in
// halves: 16 -> 8 -> 4, then (0 + 2) + (1 + 3).
//
// Products of integers are exact. Four signed inputs (ByteInput, NibbleInput) are multiplied by four unsigned weights
// of eight or four bits (ByteWeights, NibbleWeights) for each of sixteen columns. Sums of bytes begin with
// start_bytes(offset): minus their zero point, 128, times the sum of the inputs. Sums of nibbles begin at zero, with
// start_nibbles(); ShortSums hold those of a group if they fit in 16 bits. Attention also multiplies shares, unsigned
// inputs of seven bits (ShareInput), by signed values (SignedBytes) into ByteSums.
#pragma once

#include <cmath>

#include "half.h"

#if defined(LLMSERVE_USE_AVX512)
#include "simd_avx512.h"
#elif defined(LLMSERVE_USE_AVX2_VNNI)
#include "products_avx2_vnni.h"
#elif defined(LLMSERVE_USE_AVX2)
#include "products_avx2.h"
#elif defined(LLMSERVE_USE_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace llmserve::LLMSERVE_VARIANT {

#if !defined(LLMSERVE_SHORT_SUMS)
using ShortSums = NibbleSums;
inline void hide(ByteInput&) {}
#endif

inline constexpr size_t kLanes = 16;

// Loads the first `count` lanes and sets the others to zero. Reads nothing beyond them.
template <class T>
inline F32x16 load_partial(const T* source, size_t count) {
  float lanes[kLanes] = {};
  for (size_t i = 0; i < count; ++i) lanes[i] = to_float(source[i]);
  return load(lanes);
}

template <class T>
inline void store_partial(T* target, F32x16 value, size_t count) {
  float lanes[kLanes];
  store(lanes, value);
  for (size_t i = 0; i < count; ++i) from_float(lanes[i], target + i);
}

// All sixteen lanes, or the first `count` at an edge.
inline F32x16 load_lanes(const float* source, size_t count) {
  return count == kLanes ? load(source) : load_partial(source, count);
}
inline void store_lanes(float* target, F32x16 value, size_t count) {
  return count == kLanes ? store(target, value) : store_partial(target, value, count);
}

// exp(x) = (rest + 1) * power: a small rest and a power of two. Saturates below -87.3 and above 88; NaN stays NaN.
// `multiply_add(a, b, c)` is a * b + c.
struct ExpParts {
  F32x16 rest, power;
};
template <class MultiplyAdd>
inline ExpParts exp_parts(F32x16 x, MultiplyAdd multiply_add) {
  x = min(broadcast(88.0f), max(broadcast(-87.3f), x));
  const F32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
  const F32x16 shifted = multiply_add(x, broadcast(1.44269504f), magic);
  const F32x16 n = shifted - magic;
  F32x16 r = multiply_add(n, broadcast(-0.693359375f), x);  // ln 2 in two parts
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  return {multiply_add(p, r * r, r), pow2_of_magic(shifted)};
}

// Relative error about 1e-7.
template <class MultiplyAdd>
inline F32x16 exp_by(F32x16 x, MultiplyAdd multiply_add) {
  const ExpParts parts = exp_parts(x, multiply_add);
  return (parts.rest + broadcast(1.0f)) * parts.power;
}

struct Fused {
  F32x16 operator()(F32x16 a, F32x16 b, F32x16 c) const { return fma(a, b, c); }
};

inline F32x16 exp(F32x16 x) { return exp_by(x, Fused()); }

// Computed from e = exp(2x) - 1, which is precise near zero, too: tanh = e / (e + 2).
inline F32x16 tanh(F32x16 x) {
  const ExpParts parts = exp_parts(x + x, Fused());
  const F32x16 e = fma(parts.rest, parts.power, parts.power - broadcast(1.0f));
  return e / (e + broadcast(2.0f));
}

// exp with the same roundings in every variant, with or without fused multiply-adds.
inline F32x16 exp_same(F32x16 x) {
  return exp_by(x, [](F32x16 a, F32x16 b, F32x16 c) { return a * b + c; });
}

}  // namespace llmserve::LLMSERVE_VARIANT
