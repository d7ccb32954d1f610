// F32x16 as four 128-bit vectors, in the compilers' vector extension: any architecture, no contraction into FMA.
#pragma once

#include "half.h"
#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));

// The first tactic is the default up to its rows; above, the second is if it is blocked or has more rows.
inline constexpr LinearTactic kFloatTactics[] = {{1, 2, false}, {2, 1, false}};
inline constexpr LinearTactic kInt8Tactics[] = {{1, 2, false}, {2, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{1, 2, false}, {2, 1, false}};
// Attention: queries of a tile, and vectors of positions or dimensions, that fit in the registers together.
inline constexpr size_t kQueryTile = 2, kPositionVectors = 1, kValueVectors = 1;
inline constexpr size_t kByteQueryTile = 2, kByteVectors = 1;  // the same for integers

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
// min and max return b if a lane is NaN
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

// Stores the nearest integers (ties to even) of values in [-127, 127].
inline void store_i8(int8_t* p, F32x16 v) {
  const F32x16 shifted = v + broadcast(12582912.0f);  // 1.5 * 2^23: the integer is in the low bits
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(bit_cast_to<uint32_t>(float{shifted.part[i / 4][i % 4]}));
}

// Stores the nearest integers of values in [0, 16383] as two digits of seven bits.
inline void store_digits(uint8_t* high, uint8_t* low, F32x16 v) {
  const F32x16 shifted = v + broadcast(12582912.0f);
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = bit_cast_to<uint32_t>(float{shifted.part[i / 4][i % 4]});
    high[i] = static_cast<uint8_t>(bits >> 7 & 127);
    low[i] = static_cast<uint8_t>(bits & 127);
  }
}

// Loads sixteen of the 32 weights in a row of a panel: columns [16 * half, 16 * half + 16).
template <size_t kHalf, class T>
inline F32x16 load_half(const T* p) {
  return load(p + 16 * kHalf);
}
template <size_t kHalf>
inline F32x16 load_half(const BFloat16* p) {  // the first half is at even places, the second at odd ones
  return map([&](int i) {
    const BFloat16* s = p + 8 * i + kHalf;
    return Quad{to_float(s[0]), to_float(s[2]), to_float(s[4]), to_float(s[6])};
  });
}

typedef int32_t QuadInts __attribute__((vector_size(16)));
struct I32x16 {
  QuadInts part[4];
};
inline F32x16 to_f32(I32x16 a) {
  return map([&](int i) { return __builtin_convertvector(a.part[i], Quad); });
}

// Products of four bytes for each of sixteen columns; `shift` selects one half of a byte.
struct ByteWeights {
  const uint8_t* p;
};
struct NibbleWeights {
  const uint8_t* p;
  int shift;
};
struct ByteInput {
  const int8_t* p;
};
using NibbleInput = ByteInput;
struct ByteSums {
  int32_t column[16];
};
using NibbleSums = ByteSums;
inline ByteWeights load_bytes(const uint8_t* p) { return {p}; }
template <size_t kHalf>
inline NibbleWeights load_nibbles(const uint8_t* p) {
  return {p, kHalf ? 4 : 0};
}
inline ByteInput broadcast_for_bytes(const int8_t* p) { return {p}; }
inline NibbleInput broadcast_for_nibbles(const int8_t* p) { return {p}; }
inline ByteSums start_bytes(int32_t offset) {
  ByteSums sums;
  for (int32_t& sum : sums.column) sum = offset;
  return sums;
}
inline NibbleSums start_nibbles() { return start_bytes(0); }
inline void add_products(ByteSums& sums, ByteInput x, ByteWeights w) {
  for (size_t c = 0; c < 16; ++c) {
    for (size_t i = 0; i < 4; ++i) sums.column[c] += int32_t{x.p[i]} * int32_t{w.p[4 * c + i]};
  }
}
struct SignedBytes {
  const int8_t* p;
};
struct ShareInput {
  const uint8_t* p;
};
inline SignedBytes load_signed_bytes(const int8_t* p) { return {p}; }
inline ShareInput broadcast_shares(const uint8_t* p) { return {p}; }
inline void add_products(ByteSums& sums, ShareInput x, SignedBytes w) {
  for (size_t c = 0; c < 16; ++c) {
    for (size_t i = 0; i < 4; ++i) sums.column[c] += int32_t{x.p[i]} * int32_t{w.p[4 * c + i]};
  }
}
inline void add_products(NibbleSums& sums, NibbleInput x, NibbleWeights w) {
  for (size_t c = 0; c < 16; ++c) {
    for (size_t i = 0; i < 4; ++i) sums.column[c] += int32_t{x.p[i]} * (w.p[4 * c + i] >> w.shift & 15);
  }
}
inline I32x16 total(const ByteSums& sums) {
  I32x16 out;
  __builtin_memcpy(&out, &sums, sizeof(out));
  return out;
}

// Codes of blocks as bytes, one per byte; format.h describes their packing.
struct CodeWeights {
  uint8_t code[64];
};
template <size_t kBits, size_t kHalf>
inline CodeWeights load_codes(const uint8_t* p) {
  CodeWeights out;
  for (size_t i = 0; i < 64; ++i) {
    const auto pair = [=](const uint8_t* pairs) { return uint32_t{pairs[16 * kHalf + i % 16]} >> i / 16 * 2 & 3; };
    const auto bit = [=](const uint8_t* bits) { return uint32_t{bits[8 * kHalf + i / 8]} >> i % 8 & 1; };
    uint32_t code = kBits < 4 ? pair(p) : uint32_t{p[i]} >> 4 * kHalf & 15;
    if (kBits == 3) code |= bit(p + 32) << 2;
    if (kBits == 5) code |= bit(p + 64) << 4;
    if (kBits == 6) code |= pair(p + 64) << 4;
    out.code[i] = static_cast<uint8_t>(code);
  }
  return out;
}
// Looks up 4-bit codes in a table, whose numbers have 128 added.
using TableWeights = CodeWeights;
template <size_t kHalf>
inline TableWeights look_up(const uint8_t* p, const uint8_t (&table)[16]) {
  TableWeights out = load_codes<4, kHalf>(p);
  for (uint8_t& code : out.code) code = table[code];
  return out;
}
inline void add_products(NibbleSums& sums, NibbleInput x, const CodeWeights& w) {
  for (size_t c = 0; c < 16; ++c) {
    for (size_t i = 0; i < 4; ++i) sums.column[c] += int32_t{x.p[i]} * int32_t{w.code[4 * c + i]};
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
