// Products of bytes with the 256-bit dot product, which adds four of them to a 32-bit sum. The same source for both
// encodings: AVX-VNNI, and AVX-512 VNNI with VL, which only the tests use.
#pragma once

#include "simd_avx2.h"

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr LinearTactic kInt8Tactics[] = {{2, 2, false}, {6, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{2, 2, false}, {6, 1, false}};

using QuadWeights = I32x16;
using QuadSums = I32x16;
struct QuadInput {
  __m256i v;
};
// sums += products of unsigned bytes with signed ones. In assembly: GCC 12 copies the accumulator around the intrinsic.
inline void add_dots(__m256i& sums, __m256i u8, __m256i s8) {
#if defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(u8), "x"(s8));
#else
  asm("vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(u8), "x"(s8));
#endif
}
inline QuadWeights load_quads(const int8_t* p) { return load_i32(reinterpret_cast<const int32_t*>(p)); }
inline QuadInput broadcast_quad(const uint8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm256_set1_epi32(quad)};
}
inline QuadSums zero_quads() { return broadcast_i32(0); }
inline void add_products(QuadSums& sums, QuadInput x, const QuadWeights& w) {
  add_dots(sums.lo, x.v, w.lo);
  add_dots(sums.hi, x.v, w.hi);
}
inline I32x16 total(const QuadSums& sums, I32x16 row_sums) { return sums - times_128(row_sums); }

// Weights of four bits, 0 to 15, and signed inputs.
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
inline NibbleInput broadcast_quad(const int8_t* p) { return {broadcast_quad(reinterpret_cast<const uint8_t*>(p)).v}; }
inline void add_nibble_products(I32x16& sums, NibbleInput x, const I32x16& weights) {
  add_dots(sums.lo, weights.lo, x.v);
  add_dots(sums.hi, weights.hi, x.v);
}

}  // namespace llmserve::LLMSERVE_VARIANT
