// Linear layers whose weights are blocks of a GGUF file: codes of two to six bits with the file's scales and minima, or
// codes that index a table of numbers.
#include "grouped_product.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

size_t all_blocks_bytes(const LinearGroupedArgs& args) { return block_panel_bytes(args.blocks, args.depth); }
// Factor for offsets, which are -kZeroPoint times a sum.
F32x16 times(F32x16 a, float factor) { return a * broadcast(factor / kZeroPoint); }

// Load the data of sixteen of the 32 outputs.
template <size_t kHalf>
F32x16 halves(const std::byte* p) {
  return load(reinterpret_cast<const Half*>(p) + kHalf * kLanes);
}
template <size_t kHalf>
F32x16 bytes(const std::byte* p) {
  return load(reinterpret_cast<const uint8_t*>(p) + kHalf * kLanes);
}
template <size_t kHalf>
F32x16 signed_bytes(const std::byte* p) {
  return load(reinterpret_cast<const int8_t*>(p) + kHalf * kLanes);
}

template <size_t kBits>
constexpr size_t kGroupOf = kBits == 4 || kBits == 5 ? kQuantizedGroup : kHalfGroup;

template <size_t kBits>
struct Codes : NibbleProducts<kBits, kGroupOf<kBits>> {
  using Weights = CodeWeights;
  static constexpr size_t kStepBytes = kPanelColumns * 4 * kBits / 8;
  static constexpr size_t kGroup = kGroupOf<kBits>;

  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_codes<kBits, kHalf>(reinterpret_cast<const uint8_t*>(p));
  }

  // A weight of the group is scale * code - minimum.
  struct Group {
    F32x16 scale, minimum;
    F32x16 add(I32x16 exact, F32x16 offset, F32x16 input_scale, F32x16 local) const {
      return fma(offset, minimum, fma(to_f32(exact) * input_scale, scale, local));
    }
  };
  static F32x16 offset(F32x16 value, F32x16 input_scale) { return value * input_scale; }
  static size_t panel_group_bytes(const LinearGroupedArgs& args) { return all_blocks_bytes(args); }
  template <size_t kHalf>
  static Group group(const LinearGroupedArgs& args, const std::byte* panel, size_t g) {
    constexpr float kMiddle = 1 << (kBits - 1);
    if constexpr (kBits == 2) {
      const std::byte* p = panel + g / 16 * block_bytes(Blocks::kHalfScalesAndMinima);
      const F32x16 both = bytes<kHalf>(p + (4 + g % 16) * kPanelColumns);
      const F32x16 shift = LLMSERVE_VARIANT::broadcast(12582912.0f);  // rounds
      const F32x16 high = fma(both, LLMSERVE_VARIANT::broadcast(0.0625f), LLMSERVE_VARIANT::broadcast(-0.46875f)) + shift - shift;
      const F32x16 low = fma(high, LLMSERVE_VARIANT::broadcast(-16.0f), both);
      return {halves<kHalf>(p) * low, times(halves<kHalf>(p + 2 * kPanelColumns) * high, 1.0f)};
    } else if constexpr (kGroup == kHalfGroup) {
      const std::byte* p = panel + g / 16 * block_bytes(Blocks::kHalfScales);
      const F32x16 scale = halves<kHalf>(p) * signed_bytes<kHalf>(p + (2 + g % 16) * kPanelColumns);
      return {scale, times(scale, kMiddle)};
    } else if (args.blocks == Blocks::kScales) {
      const std::byte* p = panel + g / 8 * block_bytes(Blocks::kScales);
      const std::byte* of_group = p + (4 + g % 8 * 2) * kPanelColumns;
      const F32x16 minimum = halves<kHalf>(p + 2 * kPanelColumns) * bytes<kHalf>(of_group + kPanelColumns);
      return {halves<kHalf>(p) * bytes<kHalf>(of_group), times(minimum, 1.0f)};
    } else if (args.blocks == Blocks::kScale) {
      const F32x16 scale = halves<kHalf>(panel + g * block_bytes(Blocks::kScale));
      return {scale, times(scale, kMiddle)};
    } else {
      const std::byte* p = panel + g * block_bytes(Blocks::kScaleAndMinimum);
      return {halves<kHalf>(p), times(halves<kHalf>(p + 2 * kPanelColumns), -1.0f)};
    }
  }
};

// Codes that index a table of numbers, multiplied like 8-bit weights.
class Numbers : public ByteProducts {
 public:
  using Weights = TableWeights;
  static constexpr size_t kStepBytes = kPanelColumns * 4 / 2;
  static constexpr size_t kGroup = kQuantizedGroup;

  explicit Numbers(Blocks blocks) {
    const auto& numbers = blocks == Blocks::kExponent ? kE2M1Numbers : kUnevenNumbers;
    for (size_t i = 0; i < 16; ++i) table_[i] = static_cast<uint8_t>(numbers[i] + kZeroPoint);
  }
  template <size_t kHalf>
  Weights load(const std::byte* p) const {
    return look_up<kHalf>(reinterpret_cast<const uint8_t*>(p), table_);
  }

  static size_t panel_group_bytes(const LinearGroupedArgs& args) { return all_blocks_bytes(args); }
  template <size_t kHalf>
  static Group group(const LinearGroupedArgs& args, const std::byte* panel, size_t g) {
    if (args.blocks == Blocks::kUnevenScales) {
      const std::byte* p = panel + g / 8 * block_bytes(Blocks::kUnevenScales);
      return {halves<kHalf>(p) * signed_bytes<kHalf>(p + (2 + g % 8) * kPanelColumns)};
    }
    if (args.blocks == Blocks::kUneven) return {halves<kHalf>(panel + g * block_bytes(Blocks::kUneven))};
    const F32x16 exponent = bytes<kHalf>(panel + g * block_bytes(Blocks::kExponent));
    // 2^(exponent - 128)
    return {pow2_of_magic(max(exponent, LLMSERVE_VARIANT::broadcast(2.0f)) + LLMSERVE_VARIANT::broadcast(12582912.0f - 128.0f))};
  }

 private:
  uint8_t table_[16];  // each number plus its zero point
};

// Formats that few files use have only one tactic.
constexpr LinearTactic kOnlyTactic[] = {kInt4Tactics[1]};
template <class Operation>
void run_only(const Operation& operation, size_t panel_begin, size_t panel_end) {
  run_tactic<kOnlyTactic>(operation, 0, panel_begin, panel_end);
}

}  // namespace

void linear_blocks(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  if (args.blocks == Blocks::kExponent || args.blocks == Blocks::kUneven || args.blocks == Blocks::kUnevenScales) {
    const Numbers numbers(args.blocks);
    if (run_amx(kInt4Tactics[tactic], args, panel_begin, panel_end, numbers)) return;
    return run_only(GroupedProduct<Numbers>(args, numbers), panel_begin, panel_end);
  }
  switch (args.code_bits) {
    case 2:
      return run_only(GroupedProduct<Codes<2>>(args), panel_begin, panel_end);
    case 3:
      return run_only(GroupedProduct<Codes<3>>(args), panel_begin, panel_end);
    case 4:
      return run_grouped<kInt4Tactics, Codes<4>>(args, tactic, panel_begin, panel_end);
    case 5:
      return run_grouped<kInt4Tactics, Codes<5>>(args, tactic, panel_begin, panel_end);
    default:
      return run_grouped<kInt4Tactics, Codes<6>>(args, tactic, panel_begin, panel_end);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
