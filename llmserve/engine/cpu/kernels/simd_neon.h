// F32x16 as four 128-bit registers of aarch64. Requires the dot-product extension (SDOT). Sums have the same order as
// in the x86 variants with fused multiply-add.
#pragma once

#include <arm_neon.h>

#include "half.h"
#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

// The first tactic is the default up to its rows; above, the second is if it is blocked or has more rows.
inline constexpr LinearTactic kFloatTactics[] = {{2, 2, false}, {5, 1, false}};
inline constexpr LinearTactic kInt8Tactics[] = {{2, 2, false}, {5, 1, false}};
inline constexpr LinearTactic kInt4Tactics[] = {{2, 2, false}, {5, 1, false}};
// Attention: queries of a tile, and vectors of positions or dimensions, that fit in the registers together.
inline constexpr size_t kQueryTile = 5, kPositionVectors = 1, kValueVectors = 1;
inline constexpr size_t kByteQueryTile = 5, kByteVectors = 1;  // the same for integers

struct F32x16 {
  float32x4_t part[4];
};

inline F32x16 broadcast(float v) {
  const float32x4_t part = vdupq_n_f32(v);
  return {{part, part, part, part}};
}
inline F32x16 zero() { return broadcast(0.0f); }
inline float32x4_t load4(const float* p) { return vld1q_f32(p); }
inline float32x4_t load4(const Half* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}
inline float32x4_t load4(const BFloat16* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16));
}
template <class T>
inline F32x16 load(const T* p) {
  return {{load4(p), load4(p + 4), load4(p + 8), load4(p + 12)}};
}
inline F32x16 load(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
inline F32x16 load(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
inline void store(float* p, F32x16 a) {
  for (size_t i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.part[i]);
}
inline void store(Half* p, F32x16 a) {
  for (size_t i = 0; i < 4; ++i) {
    vst1_u16(reinterpret_cast<uint16_t*>(p + 4 * i), vreinterpret_u16_f16(vcvt_f16_f32(a.part[i])));
  }
}
inline void store(BFloat16* p, F32x16 a) {
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) from_float(lanes[i], p + i);
}

inline F32x16 operator+(F32x16 a, F32x16 b) {
  return {{vaddq_f32(a.part[0], b.part[0]), vaddq_f32(a.part[1], b.part[1]), vaddq_f32(a.part[2], b.part[2]),
           vaddq_f32(a.part[3], b.part[3])}};
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  return {{vsubq_f32(a.part[0], b.part[0]), vsubq_f32(a.part[1], b.part[1]), vsubq_f32(a.part[2], b.part[2]),
           vsubq_f32(a.part[3], b.part[3])}};
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  return {{vmulq_f32(a.part[0], b.part[0]), vmulq_f32(a.part[1], b.part[1]), vmulq_f32(a.part[2], b.part[2]),
           vmulq_f32(a.part[3], b.part[3])}};
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  return {{vdivq_f32(a.part[0], b.part[0]), vdivq_f32(a.part[1], b.part[1]), vdivq_f32(a.part[2], b.part[2]),
           vdivq_f32(a.part[3], b.part[3])}};
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {{vfmaq_f32(c.part[0], a.part[0], b.part[0]), vfmaq_f32(c.part[1], a.part[1], b.part[1]),
           vfmaq_f32(c.part[2], a.part[2], b.part[2]), vfmaq_f32(c.part[3], a.part[3], b.part[3])}};
}
// min and max return b if a lane is NaN, unlike the instructions with these names
inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline F32x16 max(F32x16 a, F32x16 b) {
  return {{max4(a.part[0], b.part[0]), max4(a.part[1], b.part[1]), max4(a.part[2], b.part[2]),
           max4(a.part[3], b.part[3])}};
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return {{min4(a.part[0], b.part[0]), min4(a.part[1], b.part[1]), min4(a.part[2], b.part[2]),
           min4(a.part[3], b.part[3])}};
}
inline F32x16 abs(F32x16 a) {
  return {{vabsq_f32(a.part[0]), vabsq_f32(a.part[1]), vabsq_f32(a.part[2]), vabsq_f32(a.part[3])}};
}
// 2^n for n in [-126, 127], given n + 1.5 * 2^23
inline F32x16 pow2_of_magic(F32x16 a) {
  const uint32x4_t one = vdupq_n_u32(0x3f800000);
  for (float32x4_t& part : a.part) {
    part = vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(part), 23), one));
  }
  return a;
}

inline float reduce_add(F32x16 a) {
  const float32x4_t sums = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
  const float32x2_t pair = vadd_f32(vget_low_f32(sums), vget_high_f32(sums));
  return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}
inline float reduce_max(F32x16 a) {
  const float32x4_t peaks = max4(max4(a.part[0], a.part[2]), max4(a.part[1], a.part[3]));
  const float32x4_t pair = max4(peaks, vextq_f32(peaks, peaks, 2));
  return vgetq_lane_f32(max4(pair, vextq_f32(pair, pair, 1)), 0);
}

// Stores the nearest integers (ties to even) of values in [-127, 127].
inline void store_i8(int8_t* p, F32x16 a) {
  const auto narrow = [](float32x4_t low, float32x4_t high) {
    return vmovn_high_s32(vmovn_s32(vcvtnq_s32_f32(low)), vcvtnq_s32_f32(high));
  };
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(narrow(a.part[0], a.part[1])), narrow(a.part[2], a.part[3])));
}

// Stores the nearest integers of values in [0, 16383] as two digits of seven bits.
inline void store_digits(uint8_t* high, uint8_t* low, F32x16 a) {
  const auto narrow = [](float32x4_t first, float32x4_t second) {
    return vmovn_high_u32(vmovn_u32(vcvtnq_u32_f32(first)), vcvtnq_u32_f32(second));
  };
  const uint16x8_t first = narrow(a.part[0], a.part[1]), second = narrow(a.part[2], a.part[3]);
  vst1q_u8(high, vmovn_high_u16(vmovn_u16(vshrq_n_u16(first, 7)), vshrq_n_u16(second, 7)));
  const uint16x8_t seven_bits = vdupq_n_u16(127);
  vst1q_u8(low, vmovn_high_u16(vmovn_u16(vandq_u16(first, seven_bits)), vandq_u16(second, seven_bits)));
}

// Loads sixteen of the 32 weights in a row of a panel: columns [16 * half, 16 * half + 16).
template <size_t kHalf, class T>
inline F32x16 load_half(const T* p) {
  return load(p + 16 * kHalf);
}
template <size_t kHalf>
inline F32x16 load_half(const BFloat16* p) {  // the first half is in the low words, the second in the high ones
  const auto part = [p](size_t i) {
    const uint32x4_t words = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p) + 8 * i));
    return vreinterpretq_f32_u32(kHalf ? vandq_u32(words, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(words, 16));
  };
  return {{part(0), part(1), part(2), part(3)}};
}

struct I32x16 {
  int32x4_t part[4];
};
inline I32x16 broadcast_i32(int32_t value) {
  const int32x4_t part = vdupq_n_s32(value);
  return {{part, part, part, part}};
}
inline F32x16 to_f32(I32x16 a) {
  return {{vcvtq_f32_s32(a.part[0]), vcvtq_f32_s32(a.part[1]), vcvtq_f32_s32(a.part[2]), vcvtq_f32_s32(a.part[3])}};
}

// Four by four signed bytes; a part of the weights holds four columns. The instruction requires signed bytes on both
// sides, so the zero point is subtracted when 8-bit weights are loaded, and their sums begin at zero.
struct ByteWeights {
  int8x16_t part[4];
};
struct ByteInput {
  int8x16_t v;
};
using ByteSums = I32x16;
inline ByteWeights load_bytes(const uint8_t* p) {
  const auto part = [p](size_t i) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128)));
  };
  return {{part(0), part(1), part(2), part(3)}};
}
inline ByteInput broadcast_for_bytes(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {vreinterpretq_s8_s32(vdupq_n_s32(quad))};
}
inline ByteSums start_bytes(int32_t) { return broadcast_i32(0); }
inline void add_products(ByteSums& sums, ByteInput x, const ByteWeights& w) {
  sums.part[0] = vdotq_s32(sums.part[0], x.v, w.part[0]);
  sums.part[1] = vdotq_s32(sums.part[1], x.v, w.part[1]);
  sums.part[2] = vdotq_s32(sums.part[2], x.v, w.part[2]);
  sums.part[3] = vdotq_s32(sums.part[3], x.v, w.part[3]);
}
inline I32x16 total(const ByteSums& sums) { return sums; }

using SignedBytes = ByteWeights;
using ShareInput = ByteInput;
inline SignedBytes load_signed_bytes(const int8_t* p) {
  return {{vld1q_s8(p), vld1q_s8(p + 16), vld1q_s8(p + 32), vld1q_s8(p + 48)}};
}
inline ShareInput broadcast_shares(const uint8_t* p) { return broadcast_for_bytes(reinterpret_cast<const int8_t*>(p)); }

using NibbleWeights = ByteWeights;
using NibbleInput = ByteInput;
using NibbleSums = ByteSums;
template <size_t kHalf>
inline NibbleWeights load_nibbles(const uint8_t* p) {
  const auto part = [p](size_t i) {
    const uint8x16_t bytes = vld1q_u8(p + 16 * i);
    return vreinterpretq_s8_u8(kHalf ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
  };
  return {{part(0), part(1), part(2), part(3)}};
}
inline NibbleInput broadcast_for_nibbles(const int8_t* p) { return broadcast_for_bytes(p); }
inline NibbleSums start_nibbles() { return broadcast_i32(0); }

// Codes of blocks as bytes, one per byte; format.h describes their packing.
using CodeWeights = NibbleWeights;
template <size_t kBits, size_t kHalf>
inline CodeWeights load_codes(const uint8_t* p) {
  CodeWeights codes;
  const auto add = [&codes](size_t i, uint8x16_t more, uint8_t mask) {
    codes.part[i] = vorrq_s8(codes.part[i], vreinterpretq_s8_u8(vandq_u8(more, vdupq_n_u8(mask))));
  };
  const auto add_bits = [&add](const uint8_t* source, uint8_t value) {
    const uint8x16_t own = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    for (size_t i = 0; i < 4; ++i) {
      const uint8_t* bits = source + 8 * kHalf + 2 * i;
      add(i, vtstq_u8(vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1])), own), value);
    }
  };
  if constexpr (kBits < 4) {
    const uint8x16_t pairs = vld1q_u8(p + 16 * kHalf);
    codes = {};
    add(0, pairs, 3);
    add(1, vshrq_n_u8(pairs, 2), 3);
    add(2, vshrq_n_u8(pairs, 4), 3);
    add(3, vshrq_n_u8(pairs, 6), 3);
    if constexpr (kBits == 3) add_bits(p + 32, 4);
    return codes;
  }
  codes = load_nibbles<kHalf>(p);
  if constexpr (kBits == 5) {
    add_bits(p + 64, 16);
  } else if constexpr (kBits == 6) {
    const uint8x16_t pairs = vld1q_u8(p + 64 + 16 * kHalf);
    add(0, vshlq_n_u8(pairs, 4), 48);
    add(1, vshlq_n_u8(pairs, 2), 48);
    add(2, pairs, 48);
    add(3, vshrq_n_u8(pairs, 2), 48);
  }
  return codes;
}
// Looks up 4-bit codes in a table, whose numbers have 128 added; it is subtracted, as for 8-bit weights.
using TableWeights = ByteWeights;
template <size_t kHalf>
inline TableWeights look_up(const uint8_t* p, const uint8_t (&table)[16]) {
  TableWeights found = load_nibbles<kHalf>(p);
  const uint8x16_t numbers = veorq_u8(vld1q_u8(table), vdupq_n_u8(128));
  for (int8x16_t& part : found.part) part = vreinterpretq_s8_u8(vqtbl1q_u8(numbers, vreinterpretq_u8_s8(part)));
  return found;
}

}  // namespace llmserve::LLMSERVE_VARIANT
