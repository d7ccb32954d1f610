// The table of kernels: the only thing that differs between ISA variants.
//
// Law: every output element is reduced in one fixed order that depends on its own inputs only. How rows, columns and
// heads are cut into calls may never change a bit.
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
  const void* groups;         // of integers, as those of a linear layer; null: floats
  const float* row_scale;     // [vocabulary]
  Blocks blocks;
};

// y = (x - mean) / deviation * weight + bias, mean and deviation of each of `groups` parts of a row.
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

inline constexpr int32_t kZeroPoint = 128;  // of weights of eight bits
inline constexpr int32_t kZeroPointSteps = 16;  // zero points of weights of four bits are multiples of 1 / 16

// Rows of integers: x = value * the scale of its group.
struct QuantizedRows {
  View<int8_t> values;    // with zeros to a multiple of four
  View<float> scales;     // per group
  View<int32_t> offsets;  // per group: -kZeroPoint times the sum of its values
  View<int32_t> halves;   // the same of the first half of each group; data null: not wanted
};

// y = column scale * sum over groups of (x @ (weight - zero point).T within the group) * group scale (+ bias) (+ residual)
struct LinearGroupedArgs {
  QuantizedRows x;
  size_t num_rows;
  size_t depth;
  size_t columns;
  const uint8_t* weight;      // of eight or four bits, in panels
  const void* groups;         // what each group of inputs has for the panel's outputs (format.h)
  const float* column_scale;  // [columns]
  const float* bias;
  View<const float> residual;
  View<float> y;
  size_t code_bits = 0;  // of linear_blocks
  Blocks blocks = {};
};

// How a linear layer is cut into tiles. Chooses speed, never a result.
struct LinearTactic {
  size_t max_rows;  // of a tile
  size_t vectors;   // of sixteen columns
  bool blocked;     // many tiles in turn take a stretch of the depth that fits the nearest cache; with two vectors
  bool amx = false;  // tiles of sixteen rows; where these do not fit (amx_product.h), as the second tactic
};

// What a step adds to one layer's cache. Row r goes to slots[r] = block * block_size + position within the block.
struct CacheWriteArgs {
  CacheShape shape;
  View<const float> keys;  // [num_rows, num_kv_heads * head_dim]
  View<const float> values;
  View<const float> rope;  // of the keys: rotary_dim / 2 cosines, then as many sines per row; data null: none
  size_t rotary_dim;       // elements of a head that are turned, the first ones
  const int32_t* slots;
  size_t num_rows;
  std::byte* key_plane;
  std::byte* value_plane;
};

// One sequence's run of tokens, and where its cache lies.
struct AttentionArgs {
  CacheShape shape;
  View<const float> q;     // [rows, num_heads * head_dim], row 0 at position `start`
  View<const float> rope;  // of the queries, as above
  size_t rotary_dim;
  View<float> y;
  const std::byte* key_plane;
  const std::byte* value_plane;
  const int32_t* block_ids;
  size_t num_heads;
  size_t start;
  size_t window;        // 0: everything before
  float scale;
  float soft_cap;       // of scores, before ALiBi; 0: none
  const float* slopes;  // ALiBi, [num_heads] or null
  const float* sinks;   // scores of a position without a value, [num_heads] or null
  bool in_chunks = false;  // a query sees what is before it in its own stretch of `window` positions
  size_t end = 0;          // of what every query sees; 0: each sees up to its own position
};

// Of each row: the numbers of the `chosen` experts with the largest score + bias, of equal ones the first, in ascending
// order; then their scores. A score is the softmax of a logit among all, or its sigmoid.
struct RouteArgs {
  View<const float> logits;  // [num_rows, num_experts]
  size_t num_experts;
  size_t chosen;
  bool is_sigmoid;
  bool to_one;        // scores are divided by their sum
  const float* bias;  // [num_experts] or null
  float factor;       // of what comes out
  // Not 0: the score of the i-th expert is its softmax among those that are not chosen before it, and whose logits are
  // less than this part of their size below its own.
  float tolerance = 0.0f;
  // Only experts of the groups whose two largest scores + bias have the largest sums, or whose largest one is larger
  // than those of others; 0 groups: any.
  size_t num_groups = 0;
  size_t chosen_groups = 0;
  bool by_best = false;
  const float* scales = nullptr;  // of what comes out, [num_experts]
};

// Rows of one sequence, and the state that it has before them and after. States that are one are changed in place.
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
  View<float> y;  // not x
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
  // Of each head its matrix [key_dim, value_dim], in panels of kStateColumns columns one after the other; null: zeros.
  const float* before;
  float* after;
  View<float> y;  // [num_rows, num_heads * value_dim]
};

// y_k = x_k + the sum over j of (coefficients[k, j] + offset) * z_j, in order, of groups of `width` columns.
struct MixArgs {
  View<const float> x;             // [num_rows, groups * width]
  View<const float> z;             // [num_rows, num_others * width]
  View<const float> coefficients;  // [num_rows, groups * num_others]; data null: zeros
  size_t groups;
  size_t num_others;
  size_t width;
  size_t first;  // groups of x before it stay as they are
  float offset;
  View<float> y;  // overlaps none of them
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
  // Of each head its matrix [state_size, head_dim], in panels as above; null: zeros.
  const float* before;
  float* after;
  View<float> y;  // [num_rows, num_heads * head_dim]
};

inline constexpr size_t kStateColumns = 64;  // of a state, for one task: a panel of 128 rows fits the nearest cache

inline constexpr size_t kVocabularyBlock = 64;

struct Softmax {
  float peak;         // the largest logit
  float temperature;  // positive
};

struct KernelTable {
  const char* name;

  void (*embed)(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y);
  // Groups share their weights, or have `own_weights`.
  void (*rms_norm)(View<const float> x, const float* weight, bool own_weights, float eps, size_t groups, size_t width,
                   size_t num_rows, View<float> y);
  // y = round(x / scale), scale = max |x| / 127 of each group, with what removes the weights' zero points
  void (*quantize)(View<const float> x, size_t width, size_t num_rows, QuantizedRows y);
  // Panels [panel_begin, panel_end) of every row, with one of the tactics below.
  void (*linear)(const LinearArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  void (*linear_int8)(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  void (*linear_int4)(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  void (*linear_blocks)(const LinearGroupedArgs& args, size_t tactic, size_t panel_begin, size_t panel_end);
  std::span<const LinearTactic> float_tactics;
  std::span<const LinearTactic> int8_tactics;
  std::span<const LinearTactic> int4_tactics;  // of blocks, too
  void (*cache_write)(const CacheWriteArgs& args);
  // Rows [row_begin, row_end) of the heads that share a KV head; scratch as `attention_scratch` says.
  void (*attention)(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch);
  // The same over a cache of integers; scratch as `attention_int8_scratch` says.
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
  // y = g * sigmoid(1.702 g) * (u + 1), of g = min(gate, 7) and u = up within +-7
  void (*gated_clamped)(View<const float> x, size_t width, size_t num_rows, View<float> y);
  // Heads of head_dim, the first rotary_dim elements of each turned; y may not be x.
  void (*rope)(View<const float> x, View<const float> table, size_t rotary_dim, size_t head_dim, size_t width,
               size_t num_rows, View<float> y);
  void (*scale)(View<float> y, float factor, size_t width, size_t num_rows);  // in place
  void (*soft_cap)(View<float> y, float cap, size_t width, size_t num_rows);  // y = cap * tanh(y / cap), in place
  void (*route)(const RouteArgs& args, size_t num_rows, View<float> y);
  // y = sum of weights[i] * row places[i] of x, in this order; without weights, of these rows
  void (*combine)(View<const float> x, const uint32_t* places, const float* weights, size_t count, size_t width, float* y);
  // y = sigmoid(gate) * x, and times the gate with `silu`; the gate has one column or as many as x; y may be x
  void (*sigmoid_gate)(View<const float> x, View<const float> gate, bool is_wide, bool silu, size_t width, size_t num_rows,
                       View<float> y);
  // Columns [begin, end); `begin` is a multiple of sixteen.
  void (*convolution)(const ConvolutionArgs& args, size_t begin, size_t end);
  // Columns [begin, end) of the values of a head: a panel.
  void (*delta_rule)(const DeltaRuleArgs& args, size_t head, size_t begin, size_t end);
  // Columns [begin, end) of a head: a panel.
  void (*selective_scan)(const SelectiveScanArgs& args, size_t head, size_t begin, size_t end);
  void (*add)(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y);
  void (*multiply)(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y);
  void (*mix)(const MixArgs& args, size_t num_rows);
  // y = x, and beside it the `others` groups of z, each times the root mean square of x over its own, whose square is at
  // least `least`; y overlaps neither
  void (*spread)(View<const float> x, size_t width, View<const float> z, size_t others, float least, size_t num_rows,
                 View<float> y);
  // y = max(0, x - mean - deviations * standard deviation) of each row; y may be x
  void (*over_threshold)(View<const float> x, float deviations, size_t width, size_t num_rows, View<float> y);

  // Over logits; NaN counts as minus infinity, plus infinity as the largest float. A weight is
  // exp((x - peak) / temperature), and not quite 0 for minus infinity.
  void (*block_peaks)(const float* x, size_t count, float* peaks);  // the largest of each kVocabularyBlock
  void (*block_weights)(const float* x, size_t count, Softmax softmax, double* sums);
  void (*weights)(const float* x, size_t count, Softmax softmax, float* y);  // y may be x

  const LimitLoops* limits;
};

// Floats that one thread needs in `attention` for sequences of up to `max_seq_len` tokens: for each query of a tile itself,
// its sums, and its scores, with room for a vector before the first one and three behind the last.
inline constexpr size_t kMaxQueryTile = 8;
inline size_t attention_row_floats(size_t width) { return (width + 15) / 16 * 16; }
inline size_t attention_scratch(size_t max_seq_len, size_t head_dim) {
  return kMaxQueryTile * (2 * attention_row_floats(head_dim) + attention_row_floats(max_seq_len) + 64);
}

// Floats that one thread needs in `attention_int8`, whatever the length: `attention_int8.cpp` says for what.
inline constexpr size_t kMaxByteQueryTile = 12;
inline constexpr size_t kChunkPositions = 256;  // whose scores are kept at a time
inline constexpr size_t kPanelPositions = 32;   // whose weights share a scale
inline size_t attention_int8_scratch(size_t head_dim) {
  const size_t width = attention_row_floats(head_dim), groups = attention_row_floats(num_quantized_groups(head_dim));
  const size_t query = 2 * width + 2 * groups + kChunkPositions + kChunkPositions / 2 + 128;
  return kMaxByteQueryTile * query + kChunkPositions * (width / 4 + groups + 1) + width + 128;
}

// Which of them this build has depends on its architecture (CMakeLists.txt); which this machine runs: isa.h.
const KernelTable& portable_kernels();
const KernelTable& avx2_kernels();
const KernelTable& avx2_vnni_kernels();
const KernelTable& avx2_vnni_twin_kernels();  // of the tests: the same source in AVX-512's encoding
const KernelTable& avx512_kernels();
const KernelTable& neon_kernels();

}  // namespace llmserve
