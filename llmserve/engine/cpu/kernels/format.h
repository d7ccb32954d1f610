// The binary format of an engine file. Little endian, fixed-size records; `layout.py` writes what these structs read.
//
//   FileHeader | OpRecord[num_ops] | TensorRecord[num_tensors] | BufferRecord[num_buffers] | JSON | page-aligned tensors
//
// Tensors are row-major [rows, cols]. The weights of linear layers are packed in panels of kPanelColumns outputs, in an
// order that every ISA variant reads with plain vector loads. The last panel is padded with zeros:
//
//   f32, f16  [panel][input][output]
//   bf16      [panel][input][16][2]: outputs i and 16 + i are adjacent, so that a shift or a mask yields sixteen floats
//   u8        [panel][input / 4][output][4], each plus 128; inputs are padded with zeros, too
//   i4        [panel][input / 4][16][4] bytes from 0 to 15: output i in the low half, output 16 + i in the high half
//
// Quantized weights have a scale for every 32 inputs of an output, and one for the output. Group scales of 8-bit
// weights: binary16 [panel][group][32]. Of 4-bit weights: u8 codes [panel][group][64], the square roots of 32 scales,
// then 32 zero points in sixteenths.
//
// Codes of 5 or 6 bits: a step has the low four bits, then the upper bits, one half of the panel after the other. Bit i
// of 64, or bits 2q and 2q + 1 of byte j of 16, belong to byte i = 16q + j that `load_codes` returns. Codes of 2 or 3
// bits begin with such pairs of bits; the upper bits of 3 follow.
//
// A row of activations has a scale for every 32 inputs. The facts of a row are its f32 scales, then for each group -128
// times the sum of its values, i32. For weights with groups of sixteen, the same of each group's first half follows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmserve {

inline constexpr char kMagic[8] = {'L', 'L', 'M', 'S', 'E', 'N', 'G', '\n'};
inline constexpr uint32_t kFormatVersion = 7;
inline constexpr uint32_t kPanelPacking = 1;
inline constexpr uint32_t kPanelColumns = 32;
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint32_t kMaxHeadDim = 4096;
inline constexpr uint32_t kMaxExperts = 1u << 16;
inline constexpr uint32_t kMaxExpertGroups = 64;
inline constexpr uint32_t kMaxTaps = 32;

enum class Layout : uint32_t { kRows, kPanels };

enum class DType : uint32_t { kF32, kF16, kBF16, kI8, kI4, kI5, kI6, kI2, kI3 };

constexpr size_t dtype_bytes(DType type) {  // bytes of an element; 1 for integers of any width
  if (type == DType::kF32) return 4;
  return type == DType::kF16 || type == DType::kBF16 ? 2 : 1;
}

constexpr size_t code_bits(DType type) {
  constexpr size_t kBits[] = {32, 16, 16, 8, 4, 5, 6, 2, 3};
  return kBits[static_cast<size_t>(type)];
}

// After each kind: operands (in[0..2] -> out; ? marks optional ones); tensors; fields used.
enum class OpKind : uint32_t {
  kEmbed,         // -> f32; table; for panels of integers: group scales and row scales, groups = Blocks;
                  // window = rows of the table, if fewer than the vocabulary: later tokens have row 0
  kRmsNorm,       // x -> f32; weight of a group, or of all columns with window = 1; groups, scalar = eps
  kQuantize,      // x, row facts (written) -> i8, for linear layers of integers; norm weight?, its bias?; before
  kLinear,        // x, residual? -> f32; weight, bias?
  kLinearInt8,    // x i8, residual?, row facts -> f32; weight u8, bias?, group scales f16, output scales
  kRopeTable,     // -> f32, cos then sin; inv_freq; head_dim = rotated elements of a head, scalar = scale of both
  kCacheWrite,    // k, v, rope table of k?; layer, head_dim of its heads (0: the header's); at most one for each layer
  kAttention,     // q, rope table? -> f32; ALiBi slopes?, sinks?; layer, num_heads, window, scalar = scale, soft_cap,
                  // groups: kInStretches: windows begin at their multiples; kBidirectional: tokens see their chunk
  kGatedSilu,     // gate and up side by side -> f32
  kAdd,           // a, b -> f32
  kSelectRows,    // x, routes? -> f32; with routes, rows of kChosen are multiplied by their weights
  kLinearInt4,    // as kLinearInt8; weight i4, and u8 codes instead of group scales
  kGatedGeluTanh,  // as kGatedSilu
  kGatedGelu,
  kScale,    // -> f32, in place; scalar = factor, or a tensor of one number
  kSoftCap,  // -> f32, in place; scalar = cap
  // router logits -> f32: numbers of the chosen experts, ascending, then their weights; correction bias?, factor of
  // each expert?; groups = flags (kRouteToOne, kRouteSigmoid, kRouteByBest), scalar = factor of the weights, 0: none;
  // soft_cap = tolerance of SparseMixer; num_heads = groups of experts, 0: none, head_dim = groups to choose
  kRoute,
  kDispatch,     // routes; groups = experts: sorts the rows of kChosen by expert, for the operations up to the next one
  kCombine,      // rows of kChosen, routes -> f32: each token's weighted sum; groups = 1: without weights
  kSigmoidGate,  // x, gate of one column or as many as x -> f32: x * sigmoid(gate); groups = 1: times the gate, too
  kGatedClamped,  // as kGatedSilu
  kRope,          // x, rope table -> f32; heads of head_dim
  kLinearBlocks,  // as kLinearInt8; weight i2 to i6, and u8 instead of group scales; groups = Blocks
  kLayerNorm,     // x -> f32; weight and bias? of all columns; groups, scalar = eps
  kGelu,          // x -> f32
  kGeluTanh,
  kReluSquared,
  // x -> f32, times 1 + scalar * log(1 + floor((position + window) / groups))
  kScaleByPosition,
  kConvolution,  // x -> f32; weights, `window` for each column, bias?; groups = 1: followed by SiLU. Has a state
  kDeltaRule,    // q, k and v side by side, gates -> f32; decay, its bias; num_heads, groups = key heads,
                 // head_dim of keys. Has a state
  kMultiply,     // as kAdd; instead of b, a tensor as long as a row
  kEmbedPosition,  // -> f32; table of floats, a row for each position
  kEmbedSegment,   // -> f32; table of floats, a row for each segment
  kPool,           // x of all tokens -> f32, a row for each chunk whose last token is selected;
                   // groups = Pool, plus kNormalized: divided by its L2 norm
  kSelectiveScan,  // x, b and c side by side, steps -> f32; decay, bias of steps, skip; num_heads,
                   // groups that share b and c, head_dim = rows of a head's state. Has a state
  kMix,            // x of `groups` groups of columns, z of groups as wide, coefficients? -> f32: x; to each group from
                   // number `window` on, all groups of z are added, each times its coefficient + scalar
  kSpread,         // x, z -> f32: x, then the groups of z, each as wide as x and scaled to the root mean square of x;
                   // the mean square of a group of z counts as at least scalar
  kOverThreshold,  // x -> f32: max(0, x - mean - scalar * standard deviation of the row)
  kWithHidden,     // x -> f32: x, then the token's row of the step's `hidden`
};

constexpr bool is_linear(OpKind kind) {
  return kind == OpKind::kLinear || kind == OpKind::kLinearInt8 || kind == OpKind::kLinearInt4 || kind == OpKind::kLinearBlocks;
}

inline constexpr uint32_t kRouteToOne = 1;    // the weights of a row have a sum of one
inline constexpr uint32_t kRouteSigmoid = 2;  // scores are sigmoids of the logits, not their softmax
inline constexpr uint32_t kRouteByBest = 4;   // a group's score is that of its best expert, not the sum of its two best

inline constexpr uint32_t kInStretches = 1;     // values of `groups` in kAttention
inline constexpr uint32_t kBidirectional = 2;

// How the rows of a chunk become one.
enum class Pool : uint32_t { kFirst, kLast, kMean, kMax };
inline constexpr uint32_t kNormalized = 4;

// Data of a panel's 32 outputs for one block of inputs of a GGUF file, without codes: one field after the other. A
// weight is scale * code - minimum, or scale * a number from a table. Halves are binary16.
enum class Blocks : uint32_t {
  kScale,            // 32 inputs: scale, half; the middle code is zero
  kScaleAndMinimum,  // 32 inputs: scale and minus the minimum, halves
  kScales,           // 256 inputs: factors of scales and of minima, halves; per 32 inputs a scale and a minimum, u8
  kHalfScales,       // 256 inputs: factor, half; per 16 inputs a scale, i8; the middle code is zero
  kHalfScalesAndMinima,  // 256 inputs: factors of scales and minima, halves; per 16 inputs both in a u8, the scale low
  kUneven,           // 32 inputs: scale, half; codes index kUnevenNumbers
  kUnevenScales,     // 256 inputs: factor, half; per 32 inputs a scale, i8; codes index kUnevenNumbers
  kExponent,         // 32 inputs: exponent of two plus 128, u8; less than 2 counts as 2; codes index kE2M1Numbers
};
inline constexpr uint32_t kNumBlocks = 8;
// Tables of IQ4_NL and IQ4_XS, and of MXFP4: twice the value of the four bits as a float (E2M1).
inline constexpr int8_t kUnevenNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kE2M1Numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr size_t block_inputs(Blocks blocks) {
  constexpr size_t kInputs[kNumBlocks] = {32, 32, 256, 256, 256, 32, 256, 32};
  return kInputs[static_cast<uint32_t>(blocks)];
}
constexpr size_t block_bytes(Blocks blocks) {
  constexpr size_t kBytes[kNumBlocks] = {2, 4, 20, 18, 20, 2, 10, 1};
  return kBytes[static_cast<uint32_t>(blocks)] * kPanelColumns;
}
constexpr bool in_half_groups(DType type) { return type == DType::kI6 || type == DType::kI2 || type == DType::kI3; }
constexpr bool are_codes_of(Blocks blocks, DType type) {
  switch (blocks) {
    case Blocks::kScale:
    case Blocks::kScaleAndMinimum:
    case Blocks::kScales:
      return type == DType::kI4 || type == DType::kI5;
    case Blocks::kHalfScales:
      return type == DType::kI6 || type == DType::kI3;
    case Blocks::kHalfScalesAndMinima:
      return type == DType::kI2;
    case Blocks::kUneven:
    case Blocks::kUnevenScales:
    case Blocks::kExponent:
      return type == DType::kI4;
  }
  return false;
}
constexpr size_t block_panel_bytes(Blocks blocks, size_t depth) { return depth / block_inputs(blocks) * block_bytes(blocks); }

// The rows that an operation works on.
enum class RowsOf : uint32_t {
  kTokens,
  kSelected,  // tokens whose logits are computed
  kChosen,    // one per token and expert, sorted by expert; linear layers stack the weights of all experts
};

// The function that kQuantize applies to its rows first.
enum class Before : uint32_t {
  kNothing,
  kRmsNorm,    // one group; scalar = eps
  kGatedSilu,  // gate and up side by side
  kGatedGeluTanh,
  kGatedGelu,
  kGatedClamped,
  kLayerNorm,  // one group; weight, bias?; scalar = eps
  kGelu,
  kGeluTanh,
  kReluSquared,
};

// Size of a group that shares a scale: inputs of activations and of weights, dimensions of keys.
inline constexpr size_t kQuantizedGroup = 32;
inline constexpr size_t kHalfGroup = 16;
inline constexpr size_t num_quantized_groups(size_t width) { return (width + kQuantizedGroup - 1) / kQuantizedGroup; }

inline constexpr int32_t kNoBuffer = -1;
inline constexpr int32_t kLogitsBuffer = -2;  // [selected rows, vocabulary] f32, not planned
inline constexpr int32_t kNoTensor = -1;

// Columns [offset, offset + width) of a buffer whose rows are `stride` elements apart.
struct Operand {
  int32_t buffer;
  uint32_t offset;
  uint32_t width;
  uint32_t stride;
};

struct OpRecord {
  uint32_t kind;
  uint32_t rows;  // RowsOf
  Operand in[3];
  Operand out;
  int32_t tensors[4];
  uint32_t layer;
  uint32_t num_heads;
  uint32_t head_dim;
  uint32_t groups;
  uint32_t window;
  uint32_t before;
  float scalar;
  float soft_cap;  // soft cap of attention scores; 0: none
};
static_assert(sizeof(OpRecord) == 120);

struct TensorRecord {
  uint32_t dtype;
  uint32_t rows;  // 1 for a vector
  uint32_t cols;
  uint32_t layout;
  uint64_t offset;  // byte offset in the file
};
static_assert(sizeof(TensorRecord) == 24);

struct BufferRecord {
  uint64_t bytes_per_row;
};
static_assert(sizeof(BufferRecord) == 8);

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t metadata_crc;    // CRC-32 of bytes [16, metadata_bytes)
  uint64_t file_bytes;      // size of the whole file
  uint64_t metadata_bytes;  // header, tables and JSON
  uint64_t ops_offset;
  uint64_t tensors_offset;
  uint64_t buffers_offset;
  uint64_t json_offset;
  uint64_t json_bytes;
  uint32_t num_ops;
  uint32_t num_tensors;
  uint32_t num_buffers;
  uint32_t packing;
  uint32_t vocab_size;
  uint32_t max_num_tokens;
  uint32_t max_batch_size;
  uint32_t max_seq_len;
  uint32_t block_size;
  uint32_t num_layers;
  uint32_t num_kv_heads;
  uint32_t head_dim;
  uint32_t cache_dtype;
  uint16_t mixes_heads;  // 1 where keys are integers: older files had keys that were rounded as they are
  uint16_t experts_per_token;  // 0: no experts
};
static_assert(sizeof(FileHeader) == 128);

}  // namespace llmserve
