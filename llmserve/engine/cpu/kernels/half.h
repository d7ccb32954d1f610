// Conversions of binary16 and bfloat16 in plain C++, rounded to nearest even. Included by ISA variants: everything here
// is in the variant's own namespace, so that the linker never mixes code compiled for different instruction sets.
#pragma once

#include <cstring>

#include "types.h"

namespace llmserve::LLMSERVE_VARIANT {

template <class To, class From>
[[gnu::always_inline]] inline To bit_cast_to(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

inline float to_float(float value) { return value; }
inline float to_float(int8_t value) { return value; }
inline float to_float(uint8_t value) { return value; }

inline float to_float(BFloat16 value) { return bit_cast_to<float>(uint32_t{value.bits} << 16); }

inline float to_float(Half value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bit_cast_to<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // The exponent is 112 too small after the shift; a multiplication corrects it, also for subnormals.
  const float scaled = bit_cast_to<float>(magnitude << 13) * 0x1p112f;
  return bit_cast_to<float>(bit_cast_to<uint32_t>(scaled) | sign);
}

inline void from_float(float value, float* out) { *out = value; }

inline void from_float(float value, BFloat16* out) {
  const uint32_t bits = bit_cast_to<uint32_t>(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  out->bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded >> 16);
}

inline void from_float(float value, Half* out) {
  const uint32_t bits = bit_cast_to<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN
    out->bits = static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  } else if (magnitude >= 0x477ff000u) {  // rounds to infinity
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the result to the last bits, rounded
    const float shifted = bit_cast_to<float>(magnitude) + 0.5f;
    out->bits = static_cast<uint16_t>(sign | (bit_cast_to<uint32_t>(shifted) - 0x3f000000u));
  } else {
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    out->bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
