// Products of bytes with plain AVX2: 8-bit inputs are widened to 16 bits first, because the 8-bit multiply-add would
// saturate. A part holds two sums for each of four columns.
#pragma once

#include "simd_avx2.h"

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr LinearTactic kInt8Tactics[] = {{1, 2, false}, {2, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{1, 2, false}, {2, 1, false}};

struct QuadWeights {
  __m256i part[4];
};
struct QuadInput {
  __m256i v;
};
struct QuadSums {
  __m256i part[4];
};
inline QuadWeights load_quads(const int8_t* p) {
  const auto part = [p](size_t i) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
  };
  return {{part(0), part(1), part(2), part(3)}};
}
inline QuadInput broadcast_quad(const uint8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(quad)))};
}
inline QuadSums zero_quads() {
  const __m256i z = _mm256_setzero_si256();
  return {{z, z, z, z}};
}
inline void add_products(QuadSums& sums, QuadInput x, const QuadWeights& w) {
  sums.part[0] = _mm256_add_epi32(sums.part[0], _mm256_madd_epi16(x.v, w.part[0]));
  sums.part[1] = _mm256_add_epi32(sums.part[1], _mm256_madd_epi16(x.v, w.part[1]));
  sums.part[2] = _mm256_add_epi32(sums.part[2], _mm256_madd_epi16(x.v, w.part[2]));
  sums.part[3] = _mm256_add_epi32(sums.part[3], _mm256_madd_epi16(x.v, w.part[3]));
}
inline I32x16 total(const QuadSums& sums, I32x16 row_sums) {
  const auto pairs = [](__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
  };
  return I32x16{pairs(sums.part[0], sums.part[1]), pairs(sums.part[2], sums.part[3])} - times_128(row_sums);
}

// Weights of four bits, 0 to 15, and signed inputs: pairs of products fit into 16 bits.
struct NibbleInput {
  __m256i v;
};
template <size_t kHalf>
inline I32x16 load_nibbles(const uint8_t* p) {
  const auto part = [p](size_t i) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
    return _mm256_and_si256(kHalf ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
  };
  return {part(0), part(1)};
}
inline NibbleInput broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm256_set1_epi32(quad)};
}
inline void add_nibble_products(I32x16& sums, NibbleInput x, I32x16 weights) {
  const __m256i ones = _mm256_set1_epi16(1);
  sums.lo = _mm256_add_epi32(sums.lo, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.lo, x.v), ones));
  sums.hi = _mm256_add_epi32(sums.hi, _mm256_madd_epi16(_mm256_maddubs_epi16(weights.hi, x.v), ones));
}

}  // namespace llmserve::LLMSERVE_VARIANT
