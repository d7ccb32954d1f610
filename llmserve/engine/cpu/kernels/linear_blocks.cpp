// Linear layers whose weights are blocks of a GGUF file: codes of two to six bits, with scales and minima as the file has
// them, or codes of numbers in a table.
#include "grouped_product.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

template <size_t kBits>
struct Codes {
  using Weights = CodeWeights;
  using Input = NibbleInput;
  using Sums = NibbleSums;
  static constexpr size_t kStepBytes = kPanelColumns * 4 * kBits / 8;
  static constexpr size_t kGroup = kBits == 4 || kBits == 5 ? kQuantizedGroup : kHalfGroup;

  static Sums start(int32_t) { return start_nibbles(); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_codes<kBits, kHalf>(reinterpret_cast<const uint8_t*>(p));
  }
  static Input broadcast(const std::byte* p) { return broadcast_for_nibbles(reinterpret_cast<const int8_t*>(p)); }

  // A group stands for scale * code - minimum; offsets are -kZeroPoint times a sum.
  struct Group {
    F32x16 scale, minimum;
    F32x16 add(I32x16 exact, F32x16 offset, F32x16 input_scale, F32x16 local) const {
      return fma(offset, minimum, fma(to_f32(exact) * input_scale, scale, local));
    }
  };
  static F32x16 offset(int32_t value, F32x16 input_scale) {
    return LLMSERVE_VARIANT::broadcast(static_cast<float>(value)) * input_scale;
  }
  static size_t panel_group_bytes(const LinearGroupedArgs& args) { return block_panel_bytes(args.blocks, args.depth); }
  template <size_t kHalf>
  static Group group(const LinearGroupedArgs& args, const std::byte* panel, size_t g) {
    const auto halves = [](const std::byte* p) { return LLMSERVE_VARIANT::load(reinterpret_cast<const Half*>(p) + kHalf * kLanes); };
    const auto bytes = [](const std::byte* p) { return LLMSERVE_VARIANT::load(reinterpret_cast<const uint8_t*>(p) + kHalf * kLanes); };
    const auto times = [](float factor) { return LLMSERVE_VARIANT::broadcast(factor / kZeroPoint); };
    constexpr float kMiddle = 1 << (kBits - 1);
    switch (args.blocks) {
      case Blocks::kScale: {
        const F32x16 scale = halves(panel + g * block_bytes(Blocks::kScale));
        return {scale, scale * times(kMiddle)};
      }
      case Blocks::kScaleAndMinimum: {
        const std::byte* p = panel + g * block_bytes(Blocks::kScaleAndMinimum);
        return {halves(p), halves(p + 2 * kPanelColumns) * times(-1.0f)};
      }
      case Blocks::kScales: {
        const std::byte* p = panel + g / 8 * block_bytes(Blocks::kScales);
        const std::byte* of_group = p + (4 + g % 8 * 2) * kPanelColumns;
        const F32x16 minimum = halves(p + 2 * kPanelColumns) * bytes(of_group + kPanelColumns);
        return {halves(p) * bytes(of_group), minimum * times(1.0f)};
      }
      case Blocks::kHalfScales: {
        const std::byte* p = panel + g / 16 * block_bytes(Blocks::kHalfScales);
        const auto* codes = reinterpret_cast<const int8_t*>(p + (2 + g % 16) * kPanelColumns) + kHalf * kLanes;
        const F32x16 scale = halves(p) * LLMSERVE_VARIANT::load(codes);
        return {scale, scale * times(kMiddle)};
      }
      case Blocks::kHalfScalesAndMinima: {
        const std::byte* p = panel + g / 16 * block_bytes(Blocks::kHalfScalesAndMinima);
        const F32x16 both = bytes(p + (4 + g % 16) * kPanelColumns);
        const F32x16 shift = LLMSERVE_VARIANT::broadcast(12582912.0f);  // rounds
        const F32x16 high = fma(both, LLMSERVE_VARIANT::broadcast(0.0625f), LLMSERVE_VARIANT::broadcast(-0.46875f)) + shift - shift;
        const F32x16 low = fma(high, LLMSERVE_VARIANT::broadcast(-16.0f), both);
        return {halves(p) * low, halves(p + 2 * kPanelColumns) * high * times(1.0f)};
      }
      case Blocks::kUneven:
      case Blocks::kUnevenScales:
      case Blocks::kExponent:
        break;  // of Numbers
    }
    return {zero(), zero()};
  }
};

// Codes of numbers in a table: multiplied as weights of eight bits are.
template <bool kUneven>
struct Numbers {
  using Weights = TableWeights;
  using Input = ByteInput;
  using Sums = ByteSums;
  static constexpr size_t kStepBytes = kPanelColumns * 4 / 2;
  static constexpr size_t kGroup = kQuantizedGroup;

  struct Table {
    uint8_t numbers[16];  // each plus its zero point
    constexpr Table() : numbers{} {
      for (size_t i = 0; i < 16; ++i) numbers[i] = static_cast<uint8_t>((kUneven ? kUnevenNumbers : kE2M1Numbers)[i] + kZeroPoint);
    }
  };
  static constexpr Table kTable{};

  static Sums start(int32_t offset) { return start_bytes(offset); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return look_up<kHalf>(reinterpret_cast<const uint8_t*>(p), kTable.numbers);
  }
  static Input broadcast(const std::byte* p) { return broadcast_for_bytes(reinterpret_cast<const int8_t*>(p)); }

  struct Nothing {};  // is left of the offset: sums began with it
  static Nothing offset(int32_t, F32x16) { return {}; }
  struct Group {
    F32x16 scale;
    F32x16 add(I32x16 exact, Nothing, F32x16 input_scale, F32x16 local) const {
      return fma(to_f32(exact) * input_scale, scale, local);
    }
  };
  static size_t panel_group_bytes(const LinearGroupedArgs& args) { return block_panel_bytes(args.blocks, args.depth); }
  template <size_t kHalf>
  static Group group(const LinearGroupedArgs& args, const std::byte* panel, size_t g) {
    const auto lanes = [](const std::byte* p, auto type) {
      return LLMSERVE_VARIANT::load(reinterpret_cast<const decltype(type)*>(p) + kHalf * kLanes);
    };
    if constexpr (!kUneven) {
      const F32x16 exponent = lanes(panel + g * block_bytes(Blocks::kExponent), uint8_t{});
      // Two to the exponent minus 128
      return {pow2_of_magic(max(exponent, LLMSERVE_VARIANT::broadcast(2.0f)) + LLMSERVE_VARIANT::broadcast(12582912.0f - 128.0f))};
    } else if (args.blocks == Blocks::kUneven) {
      return {lanes(panel + g * block_bytes(Blocks::kUneven), Half{})};
    }
    const std::byte* p = panel + g / 8 * block_bytes(Blocks::kUnevenScales);
    return {lanes(p, Half{}) * lanes(p + (2 + g % 8) * kPanelColumns, int8_t{})};
  }
};

// What fewer files have gets one tactic: each takes as long to compile as all of int8.
constexpr LinearTactic kOnlyTactic[] = {kInt4Tactics[1]};
template <class Operation>
void run_only(const Operation& operation, size_t panel_begin, size_t panel_end) {
  run_tactic<kOnlyTactic>(operation, 0, panel_begin, panel_end);
}

}  // namespace

void linear_blocks(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  if (args.blocks == Blocks::kExponent) return run_only(GroupedProduct<Numbers<false>>(args), panel_begin, panel_end);
  if (args.blocks == Blocks::kUneven || args.blocks == Blocks::kUnevenScales) {
    return run_only(GroupedProduct<Numbers<true>>(args), panel_begin, panel_end);
  }
  switch (args.code_bits) {
    case 2:
      return run_only(GroupedProduct<Codes<2>>(args), panel_begin, panel_end);
    case 3:
      return run_only(GroupedProduct<Codes<3>>(args), panel_begin, panel_end);
    case 4:
      return run_tactic<kInt4Tactics>(GroupedProduct<Codes<4>>(args), tactic, panel_begin, panel_end);
    case 5:
      return run_tactic<kInt4Tactics>(GroupedProduct<Codes<5>>(args), tactic, panel_begin, panel_end);
    default:
      return run_tactic<kInt4Tactics>(GroupedProduct<Codes<6>>(args), tactic, panel_begin, panel_end);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
