// Products of bytes with plain AVX2. For 8-bit weights, both sides are first widened to 16 bits, because the 8-bit
// multiply-add would saturate; a part then holds two sums for each of four columns. Pairs of 4-bit products fit in 16.
#pragma once

#include "simd_avx2.h"

#define LLMSERVE_SHORT_SUMS

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr LinearTactic kInt8Tactics[] = {{1, 2, false}, {2, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{1, 2, false}, {2, 1, false}, {2, 2, false}, {4, 1, false}};
inline constexpr size_t kByteQueryTile = 2, kByteVectors = 1;  // for attention over integers

struct ByteWeights {
  __m256i part[4];
};
struct ByteInput {
  __m256i v;
};
struct ByteSums {
  __m256i part[4];
};
inline ByteWeights load_bytes(const uint8_t* p) {
  const auto part = [p](size_t i) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
  };
  return {{part(0), part(1), part(2), part(3)}};
}
inline ByteInput broadcast_for_bytes(const int8_t* p) {
  return {_mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm256_castsi256_si128(broadcast_quad(p))))};
}
// Hides the value from the compiler, which otherwise computes equal products only once.
inline void hide(ByteInput& x) { asm volatile("" : "+x"(x.v)); }
inline ByteSums start_bytes(int32_t offset) {
  const __m256i first = _mm256_set1_epi64x(static_cast<uint32_t>(offset));  // the first of the two sums of a column
  return {{first, first, first, first}};
}
inline void add_products(ByteSums& sums, ByteInput x, const ByteWeights& w) {
  sums.part[0] = _mm256_add_epi32(sums.part[0], _mm256_madd_epi16(x.v, w.part[0]));
  sums.part[1] = _mm256_add_epi32(sums.part[1], _mm256_madd_epi16(x.v, w.part[1]));
  sums.part[2] = _mm256_add_epi32(sums.part[2], _mm256_madd_epi16(x.v, w.part[2]));
  sums.part[3] = _mm256_add_epi32(sums.part[3], _mm256_madd_epi16(x.v, w.part[3]));
}
inline I32x16 total(const ByteSums& sums) {
  const auto pairs = [](__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
  };
  return {pairs(sums.part[0], sums.part[1]), pairs(sums.part[2], sums.part[3])};
}

using SignedBytes = ByteWeights;
using ShareInput = ByteInput;
inline SignedBytes load_signed_bytes(const int8_t* p) {
  const auto part = [p](size_t i) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
  };
  return {{part(0), part(1), part(2), part(3)}};
}
inline ShareInput broadcast_shares(const uint8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(quad)))};
}

struct NibbleInput {
  __m256i v;
};
using NibbleSums = I32x16;
inline NibbleInput broadcast_for_nibbles(const int8_t* p) { return {broadcast_quad(p)}; }
inline NibbleSums start_nibbles() { return broadcast_i32(0); }
inline void add_products(NibbleSums& sums, NibbleInput x, const NibbleWeights& weights) {
  const __m256i ones = _mm256_set1_epi16(1);
  sums.lo = _mm256_add_epi32(sums.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.lo, x.v), ones));
  sums.hi = _mm256_add_epi32(sums.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.hi, x.v), ones));
}
inline I32x16 total(const NibbleSums& sums) { return sums; }

// Two sums of 16 bits for each column.
struct ShortSums : I32x16 {};
inline void add_products(ShortSums& sums, NibbleInput x, const NibbleWeights& weights) {
  sums.lo = _mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(weights.lo, x.v));
  sums.hi = _mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(weights.hi, x.v));
}
inline I32x16 total(const ShortSums& sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(sums.lo, ones), _mm256_madd_epi16(sums.hi, ones)};
}

using TableWeights = ByteWeights;
template <size_t kHalf>
inline TableWeights look_up(const uint8_t* p, const uint8_t (&table)[16]) {
  const NibbleWeights bytes = look_up_bytes<kHalf>(p, table);
  const auto wide = [](__m128i half) { return _mm256_cvtepu8_epi16(half); };
  return {{wide(_mm256_castsi256_si128(bytes.lo)), wide(_mm256_extracti128_si256(bytes.lo, 1)),
           wide(_mm256_castsi256_si128(bytes.hi)), wide(_mm256_extracti128_si256(bytes.hi, 1))}};
}

}  // namespace llmserve::LLMSERVE_VARIANT
