// Products of bytes with the 256-bit dot product, which adds four products to a 32-bit sum. The same source serves both
// encodings: AVX-VNNI, and AVX-512 VNNI with VL, which only tests use.
#pragma once

#include "simd_avx2.h"

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr LinearTactic kInt8Tactics[] = {{2, 2, false}, {6, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{2, 2, false}, {6, 1, false}};
inline constexpr size_t kByteQueryTile = 6, kByteVectors = 1;  // for attention over integers

using ByteWeights = NibbleWeights;
struct ByteInput {
  __m256i v;
};
using ByteSums = I32x16;
// sums += products of unsigned and signed bytes. Assembly, because GCC 12 copies the accumulator around the intrinsic.
inline void add_dots(__m256i& sums, __m256i u8, __m256i s8) {
#if defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(u8), "x"(s8));
#else
  asm("vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(u8), "x"(s8));
#endif
}
inline ByteWeights load_bytes(const uint8_t* p) {
  const auto* source = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(source), _mm256_loadu_si256(source + 1)};
}
inline ByteInput broadcast_for_bytes(const int8_t* p) { return {broadcast_quad(p)}; }
inline ByteSums start_bytes(int32_t offset) { return broadcast_i32(offset); }
inline void add_products(ByteSums& sums, ByteInput x, const ByteWeights& w) {
  add_dots(sums.lo, w.lo, x.v);
  add_dots(sums.hi, w.hi, x.v);
}
inline I32x16 total(const ByteSums& sums) { return sums; }

struct SignedBytes {
  __m256i lo;
  __m256i hi;
};
struct ShareInput {
  __m256i v;
};
inline SignedBytes load_signed_bytes(const int8_t* p) {
  const auto* source = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(source), _mm256_loadu_si256(source + 1)};
}
inline ShareInput broadcast_shares(const uint8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm256_set1_epi32(quad)};
}
inline void add_products(ByteSums& sums, ShareInput x, const SignedBytes& w) {
  add_dots(sums.lo, x.v, w.lo);
  add_dots(sums.hi, x.v, w.hi);
}

using NibbleInput = ByteInput;
using NibbleSums = ByteSums;
inline NibbleInput broadcast_for_nibbles(const int8_t* p) { return broadcast_for_bytes(p); }
inline NibbleSums start_nibbles() { return start_bytes(0); }

using TableWeights = ByteWeights;
template <size_t kHalf>
inline TableWeights look_up(const uint8_t* p, const uint8_t (&table)[16]) {
  return look_up_bytes<kHalf>(p, table);
}

}  // namespace llmserve::LLMSERVE_VARIANT
