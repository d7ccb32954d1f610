// Linear layers with 8-bit weights.
#include "grouped_product.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

struct EightBits : ByteProducts {
  using Weights = ByteWeights;
  static constexpr size_t kStepBytes = kPanelColumns * 4;
  static constexpr size_t kGroup = kQuantizedGroup, kGroupBytes = kPanelColumns * sizeof(Half);

  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_bytes(reinterpret_cast<const uint8_t*>(p) + 4 * kLanes * kHalf);
  }
  static size_t panel_group_bytes(const LinearGroupedArgs& args) {
    return num_quantized_groups(args.depth) * kGroupBytes;
  }
  template <size_t kHalf>
  static Group group(const LinearGroupedArgs&, const std::byte* panel, size_t g) {
    return {LLMSERVE_VARIANT::load(reinterpret_cast<const Half*>(panel + g * kGroupBytes) + kHalf * kLanes)};
  }
};

}  // namespace

void linear_int8(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_grouped<kInt8Tactics, EightBits>(args, tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
