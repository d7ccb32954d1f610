// F32x16 as one 512-bit register. Requires AVX-512 F, BW, DQ, VL and VNNI.
#pragma once

#include <immintrin.h>

#include "half.h"
#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

#if defined(LLMSERVE_FEW_SHAPES)  // in the test build, where tiles compile slowly: each path over tiles has some
inline constexpr LinearTactic kFloatTactics[] = {{5, 2, false}, {5, 2, true}, {3, 4, false}};
inline constexpr LinearTactic kInt8Tactics[] = {{5, 2, false}, {3, 4, false}, {16, 1, false, true}};
inline constexpr LinearTactic kInt4Tactics[] = {{5, 2, false}, {3, 2, false}, {16, 1, false, true}};
inline constexpr size_t kQueryTile = 3, kPositionVectors = 2, kValueVectors = 2;
inline constexpr size_t kByteQueryTile = 5, kByteVectors = 2;
#else
// The first tactic is the default up to its rows; above, the second is if it is blocked or has more rows.
inline constexpr LinearTactic kFloatTactics[] = {{12, 2, false}, {12, 2, true}, {6, 4, false}};
inline constexpr LinearTactic kInt8Tactics[] = {{12, 2, false}, {6, 4, false}, {16, 1, false, true}};
inline constexpr LinearTactic kInt4Tactics[] = {{12, 2, false}, {6, 2, false}, {16, 1, false, true}};
// Attention: queries of a tile, and vectors of positions or dimensions, that fit in the registers together.
inline constexpr size_t kQueryTile = 8, kPositionVectors = 2, kValueVectors = 2;
inline constexpr size_t kByteQueryTile = 12, kByteVectors = 2;  // the same for integers
#endif

struct F32x16 {
  __m512 v;
};

inline F32x16 broadcast(float v) { return {_mm512_set1_ps(v)}; }
inline F32x16 zero() { return {_mm512_setzero_ps()}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F32x16 load(const BFloat16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
inline F32x16 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32x16 load(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(Half* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat16* p, F32x16 a) {
  float lanes[16];
  _mm512_storeu_ps(lanes, a.v);
  for (int i = 0; i < 16; ++i) from_float(lanes[i], p + i);
}

inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// min and max return b if a lane is NaN
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
// 2^n for n in [-126, 127], given n + 1.5 * 2^23
inline F32x16 pow2_of_magic(F32x16 a) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(a.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)))};
}

inline __m128 fold(F32x16 a) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float reduce_add(F32x16 a) {
  const __m128 s = fold(a);
  const __m128 pair = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline float reduce_max(F32x16 a) { return _mm512_reduce_max_ps(a.v); }

// Stores the nearest integers (ties to even) of values in [-127, 127].
inline void store_i8(int8_t* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// Stores the nearest integers of values in [0, 16383] as two digits of seven bits.
inline void store_digits(uint8_t* high, uint8_t* low, F32x16 a) {
  const __m512i values = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srli_epi32(values, 7)));
  const __m512i rest = _mm512_and_si512(values, _mm512_set1_epi32(127));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(rest));
}

// Loads sixteen of the 32 weights in a row of a panel: columns [16 * half, 16 * half + 16).
template <size_t kHalf, class T>
inline F32x16 load_half(const T* p) {
  return load(p + 16 * kHalf);
}
template <size_t kHalf>
inline F32x16 load_half(const BFloat16* p) {  // the first half is in the low words, the second in the high ones
  const __m512i words = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(kHalf ? _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                                    : _mm512_slli_epi32(words, 16))};
}

struct I32x16 {
  __m512i v;
};
inline F32x16 to_f32(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

struct ByteWeights {
  __m512i v;
};
struct ByteInput {
  __m512i v;
};
struct ByteSums {
  __m512i v;
};
inline ByteWeights load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline ByteInput broadcast_for_bytes(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm512_set1_epi32(quad)};
}
inline ByteSums start_bytes(int32_t offset) { return {_mm512_set1_epi32(offset)}; }
// In assembly, because GCC 12 copies the accumulator around the intrinsic, which halves the speed.
inline void add_products(ByteSums& sums, ByteInput x, ByteWeights w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(w.v), "v"(x.v));
}
inline I32x16 total(ByteSums sums) { return {sums.v}; }

struct SignedBytes {
  __m512i v;
};
struct ShareInput {
  __m512i v;
};
inline SignedBytes load_signed_bytes(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
inline ShareInput broadcast_shares(const uint8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm512_set1_epi32(quad)};
}
inline void add_products(ByteSums& sums, ShareInput x, SignedBytes w) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(x.v), "v"(w.v));
}

using NibbleWeights = ByteWeights;
using NibbleInput = ByteInput;
using NibbleSums = ByteSums;
template <size_t kHalf>
inline NibbleWeights load_nibbles(const uint8_t* p) {
  const __m512i bytes = _mm512_loadu_si512(p);
  return {_mm512_and_si512(kHalf ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15))};
}
inline NibbleInput broadcast_for_nibbles(const int8_t* p) { return broadcast_for_bytes(p); }
inline NibbleSums start_nibbles() { return start_bytes(0); }

// Codes of blocks as bytes, one per byte; format.h describes their packing.
using CodeWeights = NibbleWeights;
template <size_t kHalf, int kPlace>
inline __m512i pairs_of(const uint8_t* p) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * kHalf));
  constexpr int kSecond = (kPlace + 30) % 32, kThird = (kPlace + 28) % 32, kLast = (kPlace + 26) % 32;
  const __m512i turns = _mm512_setr_epi32(kPlace, kPlace, kPlace, kPlace, kSecond, kSecond, kSecond, kSecond, kThird, kThird,
                                          kThird, kThird, kLast, kLast, kLast, kLast);
  const __m512i turned = _mm512_rolv_epi32(_mm512_broadcast_i32x4(pairs), turns);
  return _mm512_and_si512(turned, _mm512_set1_epi8(static_cast<char>(3 << kPlace)));
}
template <size_t kHalf>
inline __m512i with_bit(__m512i low, const uint8_t* p, char value) {
  uint64_t bits;
  __builtin_memcpy(&bits, p + 8 * kHalf, 8);
  return _mm512_mask_add_epi8(low, bits, low, _mm512_set1_epi8(value));
}
template <size_t kBits, size_t kHalf>
inline CodeWeights load_codes(const uint8_t* p) {
  if constexpr (kBits < 4) {
    const __m512i low = pairs_of<kHalf, 0>(p);
    return {kBits == 3 ? with_bit<kHalf>(low, p + 32, 4) : low};
  }
  const CodeWeights low = load_nibbles<kHalf>(p);
  if constexpr (kBits == 5) return {with_bit<kHalf>(low.v, p + 64, 16)};
  if constexpr (kBits == 6) return {_mm512_or_si512(low.v, pairs_of<kHalf, 4>(p + 64))};
  return low;
}
// Looks up 4-bit codes in a table, whose numbers have 128 added.
using TableWeights = ByteWeights;
template <size_t kHalf>
inline TableWeights look_up(const uint8_t* p, const uint8_t (&table)[16]) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), load_nibbles<kHalf>(p).v)};
}

}  // namespace llmserve::LLMSERVE_VARIANT
