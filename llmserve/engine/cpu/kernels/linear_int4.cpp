// Linear layers whose weights have four bits.
#include "grouped_product.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

struct FourBits {
  using Weights = NibbleWeights;
  using Input = NibbleInput;
  using Sums = NibbleSums;
  static constexpr size_t kStepBytes = kPanelColumns * 4 / 2;
  static constexpr size_t kGroupBytes = kPanelColumns * 2;

  static Sums start(int32_t) { return start_nibbles(); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_nibbles<kHalf>(reinterpret_cast<const uint8_t*>(p));
  }
  static Input broadcast(const std::byte* p) { return broadcast_for_nibbles(reinterpret_cast<const int8_t*>(p)); }

  static F32x16 offset(int32_t value) { return LLMSERVE_VARIANT::broadcast(static_cast<float>(value)); }
  struct Group {
    F32x16 scale, zero;  // the zero point for offsets, which are -kZeroPoint times a sum
    F32x16 sum(I32x16 exact, F32x16 offset) const { return fma(offset, zero, to_f32(exact)); }  // exact: below 2^24
  };
  template <size_t kHalf>
  static Group group(const std::byte* p) {
    const auto* codes = reinterpret_cast<const uint8_t*>(p) + kHalf * kLanes;
    const F32x16 root = LLMSERVE_VARIANT::load(codes), zero = LLMSERVE_VARIANT::load(codes + kPanelColumns);
    return {root * root, zero * LLMSERVE_VARIANT::broadcast(1.0f / (kZeroPoint * kZeroPointSteps))};
  }
};

}  // namespace

void linear_int4(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_tactic<kInt4Tactics>(GroupedProduct<FourBits>(args), tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
