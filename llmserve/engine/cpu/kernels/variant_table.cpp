#include "simd.h"
#include "variant.h"

#define LLMSERVE_TEXT_OF(name) #name
#define LLMSERVE_TEXT(name) LLMSERVE_TEXT_OF(name)
#define LLMSERVE_JOIN_OF(a, b) a##b
#define LLMSERVE_JOIN(a, b) LLMSERVE_JOIN_OF(a, b)

namespace llmserve {

#if defined(LLMSERVE_USE_AVX2_VNNI)

// The AVX2 table with other kernels for products of bytes.
const KernelTable& LLMSERVE_JOIN(LLMSERVE_VARIANT, _kernels)() {
  namespace variant = LLMSERVE_VARIANT;
  static const KernelTable kTable = [] {
    KernelTable table = avx2_kernels();
    table.name = LLMSERVE_TEXT(LLMSERVE_VARIANT);
    table.linear_int8 = variant::linear_int8;
    table.linear_int4 = variant::linear_int4;
    table.linear_blocks = variant::linear_blocks;
    table.attention_int8 = variant::attention_int8;
    table.int8_tactics = variant::kInt8Tactics;
    table.int4_tactics = variant::kInt4Tactics;
    table.limits = &variant::kLimitLoops;
    return table;
  }();
  return kTable;
}

#else

const KernelTable& LLMSERVE_JOIN(LLMSERVE_VARIANT, _kernels)() {
  namespace variant = LLMSERVE_VARIANT;
  static constexpr KernelTable kTable = {
      .name = LLMSERVE_TEXT(LLMSERVE_VARIANT),
      .embed = variant::embed,
      .rms_norm = variant::rms_norm,
      .quantize = variant::quantize,
      .linear = variant::linear,
      .linear_int8 = variant::linear_int8,
      .linear_int4 = variant::linear_int4,
      .linear_blocks = variant::linear_blocks,
      .float_tactics = variant::kFloatTactics,
      .int8_tactics = variant::kInt8Tactics,
      .int4_tactics = variant::kInt4Tactics,
      .cache_write = variant::cache_write,
      .attention = variant::attention,
      .attention_int8 = variant::attention_int8,
      .layer_norm = variant::layer_norm,
      .gelu = variant::gelu,
      .gelu_tanh = variant::gelu_tanh,
      .relu_squared = variant::relu_squared,
      .gated_silu = variant::gated_silu,
      .gated_gelu_tanh = variant::gated_gelu_tanh,
      .gated_gelu = variant::gated_gelu,
      .gated_clamped = variant::gated_clamped,
      .rope = variant::rope,
      .scale = variant::scale,
      .soft_cap = variant::soft_cap,
      .route = variant::route,
      .combine = variant::combine,
      .sigmoid_gate = variant::sigmoid_gate,
      .convolution = variant::convolution,
      .delta_rule = variant::delta_rule,
      .selective_scan = variant::selective_scan,
      .add = variant::add,
      .multiply = variant::multiply,
      .mix = variant::mix,
      .spread = variant::spread,
      .over_threshold = variant::over_threshold,
      .block_peaks = variant::block_peaks,
      .block_weights = variant::block_weights,
      .weights = variant::weights,
      .limits = &variant::kLimitLoops,
  };
  return kTable;
}

#endif

}  // namespace llmserve
