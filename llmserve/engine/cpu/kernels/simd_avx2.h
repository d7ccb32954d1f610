// F32x16 as two 256-bit registers. Requires AVX2, FMA and F16C. Sums have the same order as in the AVX-512 variant.
// Products of bytes are in separate files, because some processors have an instruction for them.
#pragma once

#include <immintrin.h>

#include "half.h"
#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

// The first tactic is the default up to its rows; above, the second is if it is blocked or has more rows.
inline constexpr LinearTactic kFloatTactics[] = {{2, 2, false}, {6, 1, false}};
// Attention: queries of a tile, and vectors of positions or dimensions, that fit in the registers together.
inline constexpr size_t kQueryTile = 4, kPositionVectors = 1, kValueVectors = 1;

struct F32x16 {
  __m256 lo;
  __m256 hi;
};

inline F32x16 broadcast(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline F32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 load8(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline __m256 load8(const BFloat16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline __m256 load8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256 load8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
template <class T>
inline F32x16 load(const T* p) {
  return {load8(p), load8(p + 8)};
}
inline void store(float* p, F32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(Half* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat16* p, F32x16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) from_float(lanes[i], p + i);
}

inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// min and max return b if a lane is NaN
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 abs(F32x16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
inline __m256 pow2_of_magic8(__m256 a) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(a), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
}
// 2^n for n in [-126, 127], given n + 1.5 * 2^23
inline F32x16 pow2_of_magic(F32x16 a) { return {pow2_of_magic8(a.lo), pow2_of_magic8(a.hi)}; }

inline __m128 fold(F32x16 a) {
  const __m256 half = _mm256_add_ps(a.lo, a.hi);
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float reduce_add(F32x16 a) {
  const __m128 s = fold(a);
  const __m128 pair = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline float reduce_max(F32x16 a) {
  const __m256 half = _mm256_max_ps(a.lo, a.hi);
  const __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

// Stores integers in [-128, 127] as bytes.
inline void store_bytes(void* p, __m256i lo, __m256i hi) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
}
// Stores the nearest integers (ties to even) of values in [-127, 127].
inline void store_i8(int8_t* p, F32x16 a) { store_bytes(p, _mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)); }
// Stores the nearest integers of values in [0, 16383] as two digits of seven bits.
inline void store_digits(uint8_t* high, uint8_t* low, F32x16 a) {
  const __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi), seven_bits = _mm256_set1_epi32(127);
  store_bytes(high, _mm256_srli_epi32(lo, 7), _mm256_srli_epi32(hi, 7));
  store_bytes(low, _mm256_and_si256(lo, seven_bits), _mm256_and_si256(hi, seven_bits));
}

// Loads sixteen of the 32 weights in a row of a panel: columns [16 * half, 16 * half + 16).
template <size_t kHalf, class T>
inline F32x16 load_half(const T* p) {
  return load(p + 16 * kHalf);
}
template <size_t kHalf>
inline F32x16 load_half(const BFloat16* p) {  // the first half is in the low words, the second in the high ones
  const auto part = [p](size_t i) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_castsi256_ps(kHalf ? _mm256_and_si256(words, high) : _mm256_slli_epi32(words, 16));
  };
  return {part(0), part(1)};
}

struct I32x16 {
  __m256i lo;
  __m256i hi;
};
inline I32x16 broadcast_i32(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline F32x16 to_f32(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline __m256i broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

// 4-bit weights, 0 to 15, as bytes.
struct NibbleWeights {
  __m256i lo;
  __m256i hi;
};
template <size_t kHalf>
inline NibbleWeights load_nibbles(const uint8_t* p) {
  const auto part = [p](size_t i) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
    return _mm256_and_si256(kHalf ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
  };
  return {part(0), part(1)};
}

// Codes of blocks as bytes, one per byte; format.h describes their packing.
using CodeWeights = NibbleWeights;
template <size_t kHalf, int kPlace>  // the first bit of a pair: 0 or 4
inline CodeWeights pairs_of(const uint8_t* p) {
  const __m128i source = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * kHalf));
  const __m256i pairs = _mm256_broadcastsi128_si256(source), mask = _mm256_set1_epi8(static_cast<char>(3 << kPlace));
  const __m256i lo = kPlace ? _mm256_sllv_epi32(pairs, _mm256_setr_epi32(4, 4, 4, 4, 2, 2, 2, 2))
                            : _mm256_srlv_epi32(pairs, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2));
  const __m256i hi = _mm256_srlv_epi32(pairs, kPlace ? _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2)
                                                     : _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6));
  return {_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)};
}
template <size_t kHalf>
inline CodeWeights with_bit(CodeWeights low, const uint8_t* p, char value) {
  const auto part = [p, value](size_t i) {
    int32_t bits;
    __builtin_memcpy(&bits, p + 8 * kHalf + 4 * i, 4);
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), places);
    const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own), _mm256_set1_epi8(value));
  };
  return {_mm256_or_si256(low.lo, part(0)), _mm256_or_si256(low.hi, part(1))};
}
template <size_t kBits, size_t kHalf>
inline CodeWeights load_codes(const uint8_t* p) {
  if constexpr (kBits < 4) {
    const CodeWeights low = pairs_of<kHalf, 0>(p);
    return kBits == 3 ? with_bit<kHalf>(low, p + 32, 4) : low;
  }
  const CodeWeights low = load_nibbles<kHalf>(p);
  if constexpr (kBits == 5) return with_bit<kHalf>(low, p + 64, 16);
  if constexpr (kBits == 6) {
    const CodeWeights high = pairs_of<kHalf, 4>(p + 64);
    return {_mm256_or_si256(low.lo, high.lo), _mm256_or_si256(low.hi, high.hi)};
  }
  return low;
}
// Looks up 4-bit codes in a table, whose numbers have 128 added.
template <size_t kHalf>
inline NibbleWeights look_up_bytes(const uint8_t* p, const uint8_t (&table)[16]) {
  const NibbleWeights codes = load_nibbles<kHalf>(p);
  const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(numbers, codes.lo), _mm256_shuffle_epi8(numbers, codes.hi)};
}

}  // namespace llmserve::LLMSERVE_VARIANT
