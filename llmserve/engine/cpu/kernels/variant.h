// Kernels of the variant that is being compiled, used by `variant_table.cpp`. One declaration per entry of KernelTable.
#pragma once

#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

void embed(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y);
void rms_norm(View<const float> x, const float* weight, bool own_weights, float eps, size_t groups, size_t width,
              size_t num_rows, View<float> y);
void quantize(View<const float> x, size_t width, size_t num_rows, QuantizedRows y);
void linear(const LinearArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
void linear_int8(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
void linear_int4(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
void linear_blocks(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
void cache_write(const CacheWriteArgs& args);
void attention(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch);
void attention_int8(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch);
void layer_norm(View<const float> x, const LayerNormArgs& args, size_t num_rows, View<float> y);
void gelu(View<const float> x, size_t width, size_t num_rows, View<float> y);
void gelu_tanh(View<const float> x, size_t width, size_t num_rows, View<float> y);
void relu_squared(View<const float> x, size_t width, size_t num_rows, View<float> y);
void gated_silu(View<const float> x, size_t width, size_t num_rows, View<float> y);
void gated_gelu_tanh(View<const float> x, size_t width, size_t num_rows, View<float> y);
void gated_gelu(View<const float> x, size_t width, size_t num_rows, View<float> y);
void gated_clamped(View<const float> x, size_t width, size_t num_rows, View<float> y);
void rope(View<const float> x, View<const float> table, size_t rotary_dim, size_t head_dim, size_t width, size_t num_rows,
          View<float> y);
void scale(View<float> y, float factor, size_t width, size_t num_rows);
void soft_cap(View<float> y, float cap, size_t width, size_t num_rows);
void route(const RouteArgs& args, size_t num_rows, View<float> y);
void combine(View<const float> x, const uint32_t* places, const float* weights, size_t count, size_t width, float* y);
void sigmoid_gate(View<const float> x, View<const float> gate, bool is_wide, bool silu, size_t width, size_t num_rows,
                  View<float> y);
void convolution(const ConvolutionArgs& args, size_t begin, size_t end);
void delta_rule(const DeltaRuleArgs& args, size_t head, size_t begin, size_t end);
void selective_scan(const SelectiveScanArgs& args, size_t head, size_t begin, size_t end);
void add(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y);
void mix(const MixArgs& args, size_t num_rows);
void spread(View<const float> x, size_t width, View<const float> z, size_t others, float least, size_t num_rows,
            View<float> y);
void over_threshold(View<const float> x, float deviations, size_t width, size_t num_rows, View<float> y);
void multiply(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y);
void block_peaks(const float* x, size_t count, float* peaks);
void block_weights(const float* x, size_t count, Softmax softmax, double* sums);
void weights(const float* x, size_t count, Softmax softmax, float* y);
extern const LimitLoops kLimitLoops;

}  // namespace llmserve::LLMSERVE_VARIANT
