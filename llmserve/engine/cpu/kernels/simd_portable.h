// F32x16 as four 128-bit vectors in the compilers' vector extension: any architecture, no contraction into FMA.
#pragma once

#include "half.h"
#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));

// The first is the default for as few rows as it takes; for more, the second when it is blocked or taller.
inline constexpr LinearTactic kFloatTactics[] = {{1, 2, false}, {2, 1, false}};
inline constexpr LinearTactic kInt8Tactics[] = {{1, 2, false}, {2, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{1, 2, false}, {2, 1, false}};
// Attention: queries in a tile, and vectors of positions or of dimensions beside them, that fit into the registers.
inline constexpr size_t kQueryTile = 2, kPositionVectors = 1, kValueVectors = 1;

struct F32x16 {
  Quad part[4];
};

template <class Fn>
[[gnu::always_inline]] inline F32x16 map(Fn fn) {
  F32x16 out;
  for (int i = 0; i < 4; ++i) out.part[i] = fn(i);
  return out;
}

inline F32x16 broadcast(float v) {
  return map([&](int) { return Quad{v, v, v, v}; });
}
inline F32x16 zero() { return broadcast(0.0f); }
inline F32x16 load(const float* p) {
  F32x16 out;
  __builtin_memcpy(&out, p, sizeof(out));
  return out;
}
template <class T>
inline F32x16 load(const T* p) {
  return map([&](int i) {
    const T* s = p + 4 * i;
    return Quad{to_float(s[0]), to_float(s[1]), to_float(s[2]), to_float(s[3])};
  });
}
inline void store(float* p, F32x16 v) { __builtin_memcpy(p, &v, sizeof(v)); }
template <class T>
inline void store(T* p, F32x16 v) {
  for (int i = 0; i < 16; ++i) from_float(v.part[i / 4][i % 4], p + i);
}

inline F32x16 operator+(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] + b.part[i]; });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] - b.part[i]; });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] * b.part[i]; });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] / b.part[i]; });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return a * b + c; }
// min and max return b where a lane is not a number
inline F32x16 max(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return map([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
inline F32x16 abs(F32x16 a) {
  return map([&](int i) {
    return bit_cast_to<Quad>(bit_cast_to<QuadBits>(a.part[i]) & QuadBits{~0u, ~0u, ~0u, ~0u} >> 1);
  });
}
// 2^n for n in [-126, 127], given n + 1.5 * 2^23
inline F32x16 pow2_of_magic(F32x16 a) {
  return map([&](int i) { return bit_cast_to<Quad>((bit_cast_to<QuadBits>(a.part[i]) << 23) + 0x3f800000u); });
}

inline float reduce_add(F32x16 a) {
  const Quad s = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float reduce_max(F32x16 a) {
  float best = a.part[0][0];
  for (int i = 1; i < 16; ++i) best = a.part[i / 4][i % 4] > best ? a.part[i / 4][i % 4] : best;
  return best;
}

// Nearest integers (ties to even) of values in [-127, 127], plus 128.
inline void store_u8(uint8_t* p, F32x16 v) {
  const F32x16 shifted = v + broadcast(12582912.0f + 128.0f);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint8_t>(bit_cast_to<uint32_t>(float{shifted.part[i / 4][i % 4]}));
}

// Sixteen weights of a panel's row of thirty-two: columns [16 * half, 16 * half + 16).
template <size_t kHalf, class T>
inline F32x16 load_half(const T* p) {
  return load(p + 16 * kHalf);
}
template <size_t kHalf>
inline F32x16 load_half(const BFloat16* p) {  // the first half in the even places, the second in the odd ones
  return map([&](int i) {
    const BFloat16* s = p + 8 * i + kHalf;
    return Quad{to_float(s[0]), to_float(s[2]), to_float(s[4]), to_float(s[6])};
  });
}

typedef int32_t QuadInts __attribute__((vector_size(16)));
struct I32x16 {
  QuadInts part[4];
};
inline I32x16 load_i32(const int32_t* p) {
  I32x16 out;
  __builtin_memcpy(&out, p, sizeof(out));
  return out;
}
inline I32x16 operator-(I32x16 a, I32x16 b) {  // modulo 2^32, as on the other variants
  for (int i = 0; i < 4; ++i) {
    a.part[i] = bit_cast_to<QuadInts>(bit_cast_to<QuadBits>(a.part[i]) - bit_cast_to<QuadBits>(b.part[i]));
  }
  return a;
}
inline I32x16 times_128(I32x16 a) {
  for (int i = 0; i < 4; ++i) a.part[i] = bit_cast_to<QuadInts>(bit_cast_to<QuadBits>(a.part[i]) << 7);
  return a;
}
inline F32x16 to_f32(I32x16 a) {
  return map([&](int i) { return __builtin_convertvector(a.part[i], Quad); });
}

struct QuadWeights {
  const int8_t* p;
};
struct QuadInput {
  const uint8_t* p;
};
struct QuadSums {
  int32_t column[16];
};
inline QuadWeights load_quads(const int8_t* p) { return {p}; }
inline QuadInput broadcast_quad(const uint8_t* p) { return {p}; }
inline QuadSums zero_quads() { return {}; }
inline void add_products(QuadSums& sums, QuadInput x, QuadWeights w) {
  for (size_t c = 0; c < 16; ++c) {
    for (size_t i = 0; i < 4; ++i) sums.column[c] += int32_t{x.p[i]} * int32_t{w.p[4 * c + i]};
  }
}
inline I32x16 total(const QuadSums& sums, I32x16 row_sums) { return load_i32(sums.column) - times_128(row_sums); }

// Weights of four bits, 0 to 15, and signed inputs.
struct NibbleInput {
  const int8_t* p;
};
struct NibbleWeights {
  const uint8_t* p;
  int shift;
};
inline I32x16 broadcast_i32(int32_t value) {
  const QuadInts quad = {value, value, value, value};
  return {{quad, quad, quad, quad}};
}
template <size_t kHalf>
inline NibbleWeights load_nibbles(const uint8_t* p) {
  return {p, kHalf ? 4 : 0};
}
inline NibbleInput broadcast_quad(const int8_t* p) { return {p}; }
inline void add_nibble_products(I32x16& sums, NibbleInput x, NibbleWeights weights) {
  for (size_t c = 0; c < 16; ++c) {
    int32_t sum = 0;
    for (size_t i = 0; i < 4; ++i) sum += int32_t{x.p[i]} * (weights.p[4 * c + i] >> weights.shift & 15);
    sums.part[c / 4][c % 4] += sum;
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
