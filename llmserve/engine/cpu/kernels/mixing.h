// Mixes queries and keys before they are rounded: the Walsh-Hadamard transform of a head's dimensions.
//
// The transform spreads a large dimension over all of them, so that no single dimension determines the scale of its
// group. The product of two transformed heads is that of the heads themselves, times the number of dimensions; queries
// are divided by this number. A head size that is no power of two is cut into blocks that are: the largest that fits,
// and so on for the rest. The transform consists of sums and differences only, in one order for every instruction set.
#pragma once

#include <bit>

#include "simd.h"

namespace llmserve::LLMSERVE_VARIANT {

typedef float Four __attribute__((vector_size(16)));

inline Four load_four(const float* p) {
  Four v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
inline void store_four(float* p, Four v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Combines elements that are one or two apart, then four or eight.
inline void mix_sixteen(float* x) {
  Four v[4];
  for (size_t i = 0; i < 4; ++i) {
    const Four a = load_four(x + 4 * i);
    const Four b = __builtin_shufflevector(a, a, 0, 0, 2, 2) + __builtin_shufflevector(a, a, 1, 1, 3, 3) * Four{1, -1, 1, -1};
    v[i] = __builtin_shufflevector(b, b, 0, 1, 0, 1) + __builtin_shufflevector(b, b, 2, 3, 2, 3) * Four{1, 1, -1, -1};
  }
  const Four a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  store_four(x, a + c);
  store_four(x + 4, b + d);
  store_four(x + 8, a - c);
  store_four(x + 12, b - d);
}

// Transforms `count` elements, a power of two.
inline void mix_block(float* x, size_t count) {
  size_t half = 1;
  if (count >= kLanes) {
    for (size_t i = 0; i < count; i += kLanes) mix_sixteen(x + i);
    for (half = kLanes; half < count; half *= 2) {
      for (size_t begin = 0; begin < count; begin += 2 * half) {
        for (size_t i = begin; i < begin + half; i += kLanes) {
          const F32x16 a = load(x + i), b = load(x + i + half);
          store(x + i, a + b);
          store(x + i + half, a - b);
        }
      }
    }
  }
  for (; half < count; half *= 2) {
    for (size_t i = 0; i < count; ++i) {
      if (i & half) continue;
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
}

template <bool kIsQuery>
inline void mix_head(const float* x, size_t head_dim, float* y) {  // y may be x
  __builtin_memmove(y, x, head_dim * sizeof(float));
  for (size_t begin = 0, count; begin < head_dim; begin += count) {
    count = std::bit_floor(head_dim - begin);
    mix_block(y + begin, count);
    const float share = 1.0f / static_cast<float>(count);
    for (size_t i = begin; kIsQuery && i < begin + count; ++i) y[i] *= share;
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
