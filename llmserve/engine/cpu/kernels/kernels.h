// The table of kernels: the only interface that differs between ISA variants.
//
// Rule: every output element is reduced in one fixed order that depends on its own inputs only. The division of rows,
// columns and heads into calls must never change a bit.
#pragma once

#include <span>

#include "format.h"
#include "kv_cache.h"
#include "limits.h"
#include "types.h"

namespace llmserve {

struct EmbedArgs {
  const void* table;  // [vocabulary, width]
  DType type;
  Layout layout;
  size_t width;
  const void* groups;         // integers: as in a linear layer; null: the table has floats
  const float* row_scale;     // [vocabulary]
  Blocks blocks;
};

// y = (x - mean) / deviation * weight + bias; mean and deviation are those of each of the `groups` parts of a row.
struct LayerNormArgs {
  const float* weight;  // [width]
  const float* bias;    // [width] or null
  float eps;
  size_t groups;
  size_t width;
};

struct LinearArgs {  // y = x @ weight.T (+ bias) (+ residual)
  View<const float> x;  // [num_rows, depth]
  size_t num_rows;
  size_t depth;
  size_t columns;
  const void* weight;  // [columns, depth] of weight_type in panels
  DType weight_type;   // kF32, kF16, kBF16
  const float* bias;   // [columns] or null
  View<const float> residual;  // data null: none; may be y itself
  View<float> y;
};

inline constexpr int32_t kZeroPoint = 128;  // zero point of 8-bit weights
inline constexpr int32_t kZeroPointSteps = 16;  // zero points of 4-bit weights are multiples of 1 / 16

// Rows of quantized activations: x = value * scale of its group.
struct QuantizedRows {
  View<int8_t> values;    // padded with zeros to a multiple of four
  View<float> scales;     // per group
  View<int32_t> offsets;  // per group: -kZeroPoint times the sum of its values
  View<int32_t> halves;   // the same for the first half of each group; data null: not needed
};

// y = column scale * sum over groups of (x @ (weight - zero point).T in a group) * group scale (+ bias) (+ residual)
struct LinearGroupedArgs {
  QuantizedRows x;
  size_t num_rows;
  size_t depth;
  size_t columns;
  const uint8_t* weight;      // 8-bit or 4-bit, in panels
  const void* groups;         // data of each group of inputs for the panel's outputs (format.h)
  const float* column_scale;  // [columns]
  const float* bias;
  View<const float> residual;
  View<float> y;
  size_t code_bits = 0;  // for linear_blocks
  Blocks blocks = {};
};

// How a linear layer is cut into tiles. Affects speed only, never a result.
struct LinearTactic {
  size_t max_rows;  // rows of a tile
  size_t vectors;   // vectors of sixteen columns
  bool blocked;     // many tiles in turn work on a stretch of the depth that fits the nearest cache; with two vectors
  bool amx = false;  // tiles of sixteen rows; if these do not fit (amx_product.h), the second tactic is used
};

// The rows that a step adds to one layer's cache. Row r goes to slots[r] = block * block_size + position in the block.
struct CacheWriteArgs {
  CacheShape shape;
  View<const float> keys;  // [num_rows, num_kv_heads * head_dim]
  View<const float> values;
  View<const float> rope;  // for the keys: rotary_dim / 2 cosines, then as many sines per row; data null: none
  size_t rotary_dim;       // elements of a head that are rotated, the first ones
  const int32_t* slots;
  size_t num_rows;
  std::byte* key_plane;
  std::byte* value_plane;
};

// A run of consecutive tokens of one sequence, and the location of its cache.
struct AttentionArgs {
  CacheShape shape;
  View<const float> q;     // [rows, num_heads * head_dim], row 0 at position `start`
  View<const float> rope;  // for the queries, as in CacheWriteArgs
  size_t rotary_dim;
  View<float> y;
  const std::byte* key_plane;
  const std::byte* value_plane;
  const int32_t* block_ids;
  size_t num_heads;
  size_t start;
  size_t window;        // positions that a query sees; 0: all before it
  float scale;
  float soft_cap;       // soft cap of scores, before ALiBi; 0: none
  const float* slopes;  // ALiBi, [num_heads] or null
  const float* sinks;   // scores of a position without a value, [num_heads] or null
  bool in_chunks = false;  // a query sees the earlier positions of its own stretch of `window` positions
  size_t end = 0;          // end of the positions that every query sees; 0: each sees positions up to its own
};

// Output per row: the numbers of the `chosen` experts with the largest score + bias, in ascending order, then their
// scores. Ties go to the lower number. A score is the softmax of a logit over all experts, or its sigmoid.
struct RouteArgs {
  View<const float> logits;  // [num_rows, num_experts]
  size_t num_experts;
  size_t chosen;
  bool is_sigmoid;
  bool to_one;        // whether scores are divided by their sum
  const float* bias;  // [num_experts] or null
  float factor;       // factor of the resulting scores
  // If not 0: the score of the i-th expert is its softmax among the experts not chosen before it whose logits are below
  // its own by at most this fraction of their size.
  float tolerance = 0.0f;
  // Only experts of the `chosen_groups` best groups are chosen; 0 groups: any expert. A group is ranked by the sum of
  // its two largest scores + bias or, with `by_best`, by the largest.
  size_t num_groups = 0;
  size_t chosen_groups = 0;
  bool by_best = false;
  const float* scales = nullptr;  // factors of the resulting scores, [num_experts]
};

// Rows of one sequence, and its state before and after them. `before` and `after` may be the same: changed in place.
struct ConvolutionArgs {
  View<const float> x;  // [num_rows, width]
  size_t num_rows;
  size_t width;
  const float* weight;  // [width, taps]
  const float* bias;    // [width] or null
  size_t taps;
  bool silu;
  const float* before;  // [taps - 1, width], the rows before x; null: zeros
  float* after;
  View<float> y;  // must not overlap x
};

struct DeltaRuleArgs {
  View<const float> qkv;    // [num_rows, 2 * num_key_heads * key_dim + num_heads * value_dim]
  View<const float> gates;  // [num_rows, 2 * num_heads]
  size_t num_rows;
  size_t num_heads;
  size_t num_key_heads;
  size_t key_dim;
  size_t value_dim;
  const float* decay;   // [num_heads]
  const float* bias;    // [num_heads]
  // The matrix [key_dim, value_dim] of each head, in consecutive panels of kStateColumns columns; null: zeros.
  const float* before;
  float* after;
  View<float> y;  // [num_rows, num_heads * value_dim]
};

// y_k = x_k + the sum over j, in order, of (coefficients[k, j] + offset) * z_j, for groups of `width` columns.
struct MixArgs {
  View<const float> x;             // [num_rows, groups * width]
  View<const float> z;             // [num_rows, num_others * width]
  View<const float> coefficients;  // [num_rows, groups * num_others]; data null: zeros
  size_t groups;
  size_t num_others;
  size_t width;
  size_t first;  // groups of x before this one are copied
  float offset;
  View<float> y;  // overlaps none of the inputs
};

struct SelectiveScanArgs {
  View<const float> xbc;    // [num_rows, num_heads * head_dim + 2 * num_groups * state_size]
  View<const float> steps;  // [num_rows, num_heads]
  size_t num_rows;
  size_t num_heads;
  size_t num_groups;
  size_t state_size;
  size_t head_dim;
  const float* decay;  // [num_heads]
  const float* bias;   // [num_heads]
  const float* skip;   // [num_heads]
  // The matrix [state_size, head_dim] of each head, in panels as above; null: zeros.
  const float* before;
  float* after;
  View<float> y;  // [num_rows, num_heads * head_dim]
};

inline constexpr size_t kStateColumns = 64;  // columns of a state per task: a panel of 128 rows fits the nearest cache

inline constexpr size_t kVocabularyBlock = 64;

struct Softmax {
  float peak;         // the largest logit
  float temperature;  // positive
};

struct KernelTable {
  const char* name;

  void (*embed)(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y);
  // Groups share their weights, unless `own_weights`.
  void (*rms_norm)(View<const float> x, const float* weight, bool own_weights, float eps, size_t groups, size_t width,
                   size_t num_rows, View<float> y);
  // y = round(x / scale), scale = max |x| / 127 of each group; also computes the offsets for the weights' zero points.
  void (*quantize)(View<const float> x, size_t width, size_t num_rows, QuantizedRows y);
  // Panels [panel_begin, panel_end) of every row. `tactic`: an index into the lists below.
  void (*linear)(const LinearArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  void (*linear_int8)(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  void (*linear_int4)(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  void (*linear_blocks)(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  std::span<const LinearTactic> float_tactics;
  std::span<const LinearTactic> int8_tactics;
  std::span<const LinearTactic> int4_tactics;  // also of linear_blocks
  void (*cache_write)(const CacheWriteArgs& args);
  // Rows [row_begin, row_end) of the heads that share a KV head; `scratch` has `attention_scratch` floats.
  void (*attention)(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch);
  // The same for a cache of integers; `scratch` has `attention_int8_scratch` floats.
  void (*attention_int8)(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch);
  void (*layer_norm)(View<const float> x, const LayerNormArgs& args, size_t num_rows, View<float> y);  // y may be x
  // y = activation(x)
  void (*gelu)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  void (*gelu_tanh)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  void (*relu_squared)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  // y = activation(gate) * up, of gate and up side by side
  void (*gated_silu)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  void (*gated_gelu_tanh)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  void (*gated_gelu)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  // y = g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and u = up clamped to [-7, 7]
  void (*gated_clamped)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  // Rotates the first rotary_dim elements of each head of head_dim; y may not be x.
  void (*rope)(View<const float> x, View<const float> table, size_t rotary_dim, size_t head_dim, size_t width,
               size_t num_rows, View<float> y);
  void (*scale)(View<float> y, float factor, size_t width, size_t num_rows);  // in place
  void (*soft_cap)(View<float> y, float cap, size_t width, size_t num_rows);  // y = cap * tanh(y / cap), in place
  void (*route)(const RouteArgs& args, size_t num_rows, View<float> y);
  // y = sum of weights[i] * row places[i] of x, in this order; weights null: the plain sum of these rows
  void (*combine)(View<const float> x, const uint32_t* places, const float* weights, size_t count, size_t width, float* y);
  // y = sigmoid(gate) * x; with `silu`, also times the gate. The gate has one column or as many as x; y may be x.
  void (*sigmoid_gate)(View<const float> x, View<const float> gate, bool is_wide, bool silu, size_t width, size_t num_rows,
                       View<float> y);
  // Columns [begin, end); `begin` is a multiple of sixteen.
  void (*convolution)(const ConvolutionArgs& args, size_t begin, size_t end);
  // Columns [begin, end) of a head's values, which are one panel.
  void (*delta_rule)(const DeltaRuleArgs& args, size_t head, size_t begin, size_t end);
  // Columns [begin, end) of a head, which are one panel.
  void (*selective_scan)(const SelectiveScanArgs& args, size_t head, size_t begin, size_t end);
  void (*add)(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y);
  void (*multiply)(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y);
  void (*mix)(const MixArgs& args, size_t num_rows);
  // y = x, followed by the `others` groups of z, each scaled to the root mean square of x. The mean square of a group
  // counts as at least `least`; y overlaps neither x nor z.
  void (*spread)(View<const float> x, size_t width, View<const float> z, size_t others, float least, size_t num_rows,
                 View<float> y);
  // y = max(0, x - mean - deviations * standard deviation) of each row; y may be x
  void (*over_threshold)(View<const float> x, float deviations, size_t width, size_t num_rows, View<float> y);

  // Kernels over logits. NaN counts as minus infinity, plus infinity as the largest float. A weight is
  // exp((x - peak) / temperature), which is slightly above 0 for minus infinity.
  void (*block_peaks)(const float* x, size_t count, float* peaks);  // the largest of each kVocabularyBlock
  void (*block_weights)(const float* x, size_t count, Softmax softmax, double* sums);
  void (*weights)(const float* x, size_t count, Softmax softmax, float* y);  // y may be x

  const LimitLoops* limits;
};

// Floats of scratch per thread in `attention`, for sequences of up to `max_seq_len` tokens. Each query of a tile needs
// itself, its sums, and its scores, with room for one vector before the first score and three after the last.
inline constexpr size_t kMaxQueryTile = 8;
inline size_t attention_row_floats(size_t width) { return (width + 15) / 16 * 16; }
inline size_t attention_scratch(size_t max_seq_len, size_t head_dim) {
  return kMaxQueryTile * (2 * attention_row_floats(head_dim) + attention_row_floats(max_seq_len) + 64);
}

// Floats of scratch per thread in `attention_int8`, for any length: the members of ByteTile.
inline constexpr size_t kMaxByteQueryTile = 12;
inline constexpr size_t kChunkPositions = 256;  // positions whose scores are kept at a time
inline constexpr size_t kPanelPositions = 32;   // positions of a panel of keys or values
inline size_t attention_int8_scratch(size_t head_dim) {
  const size_t width = attention_row_floats(head_dim), groups = attention_row_floats(num_quantized_groups(head_dim));
  const size_t query = 2 * width + 2 * groups + kChunkPositions + kChunkPositions / 2 + 128;
  return kMaxByteQueryTile * query + kChunkPositions * (width / 4 + groups + 1) + width + 128;
}

// The build's architecture determines which of these exist (CMakeLists.txt); isa.h tells which this machine supports.
const KernelTable& portable_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx2_vnni_kernels();
const KernelTable& avx2_vnni_twin_kernels();  // for tests: the same source in AVX-512's encoding
const KernelTable& avx512_kernels();
const KernelTable& neon_kernels();

}  // namespace llmserve
