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

  static Sums start(int32_t offset) { return start_nibbles(offset); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_nibbles<kHalf>(reinterpret_cast<const uint8_t*>(p));
  }
  static Input broadcast(const std::byte* p) { return broadcast_for_nibbles(reinterpret_cast<const int8_t*>(p)); }
};

}  // namespace

void linear_int4(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_tactic<kInt4Tactics>(GroupedProduct<FourBits>(args), tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
