// Linear layers with 4-bit weights.
#include "grouped_product.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

struct FourBits : NibbleProducts<4, kQuantizedGroup> {
  using Weights = NibbleWeights;
  static constexpr size_t kStepBytes = kPanelColumns * 4 / 2;
  static constexpr size_t kGroup = kQuantizedGroup, kGroupBytes = kPanelColumns * 2;

  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_nibbles<kHalf>(reinterpret_cast<const uint8_t*>(p));
  }

  static F32x16 offset(F32x16 value, F32x16) { return value; }
  struct Group {
    F32x16 scale, zero;  // the zero point is for offsets, which are -kZeroPoint times a sum
    F32x16 add(I32x16 exact, F32x16 offset, F32x16 input_scale, F32x16 local) const {
      return fma(fma(offset, zero, to_f32(exact)) * input_scale, scale, local);  // the inner fma is exact: below 2^24
    }
  };
  static size_t panel_group_bytes(const LinearGroupedArgs& args) {
    return num_quantized_groups(args.depth) * kGroupBytes;
  }
  template <size_t kHalf>
  static Group group(const LinearGroupedArgs&, const std::byte* panel, size_t g) {
    const auto* codes = reinterpret_cast<const uint8_t*>(panel + g * kGroupBytes) + kHalf * kLanes;
    const F32x16 root = LLMSERVE_VARIANT::load(codes), zero = LLMSERVE_VARIANT::load(codes + kPanelColumns);
    return {root * root, zero * LLMSERVE_VARIANT::broadcast(1.0f / (kZeroPoint * kZeroPointSteps))};
  }
};

}  // namespace

void linear_int4(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_grouped<kInt4Tactics, FourBits>(args, tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
