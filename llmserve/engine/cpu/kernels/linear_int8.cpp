// Linear layers whose weights have eight bits.
#include "grouped_product.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

struct EightBits {
  using Weights = ByteWeights;
  using Input = ByteInput;
  using Sums = ByteSums;
  static constexpr size_t kStepBytes = kPanelColumns * 4;

  static Sums start(int32_t offset) { return start_bytes(offset); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_bytes(reinterpret_cast<const uint8_t*>(p) + 4 * kLanes * kHalf);
  }
  static Input broadcast(const std::byte* p) { return broadcast_for_bytes(reinterpret_cast<const int8_t*>(p)); }
};

}  // namespace

void linear_int8(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_tactic<kInt8Tactics>(GroupedProduct<EightBits>(args), tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
