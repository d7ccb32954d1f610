// Linear layers whose weights are blocks of a GGUF file: codes of four, five or six bits, with scales and minima as the
// file has them.
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
  static constexpr size_t kGroup = kBits == 6 ? kHalfGroup : kQuantizedGroup;

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
    }
    return {zero(), zero()};
  }
};

}  // namespace

void linear_blocks(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  switch (args.code_bits) {
    case 4:
      return run_tactic<kInt4Tactics>(GroupedProduct<Codes<4>>(args), tactic, panel_begin, panel_end);
    case 5:
      return run_tactic<kInt4Tactics>(GroupedProduct<Codes<5>>(args), tactic, panel_begin, panel_end);
    default:
      return run_tactic<kInt4Tactics>(GroupedProduct<Codes<6>>(args), tactic, panel_begin, panel_end);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
