// The engine file, as bytes. Little endian, fixed-size records; `layout.py` writes what these structs read.
//
//   FileHeader | OpRecord[num_ops] | TensorRecord[num_tensors] | BufferRecord[num_buffers] | JSON | page-aligned tensors
//
// Tensors are row-major [rows, cols]. The weights of linear layers are packed in panels of kPanelColumns outputs, the last
// one filled up with zeros, in an order that every ISA variant reads with plain vector loads:
//
//   f32, f16  [panel][input][output]
//   bf16      [panel][input][16][2]: outputs i and 16 + i side by side, so that a shift or a mask makes sixteen floats
//   u8        [panel][input / 4][output][4], each plus 128, the inputs filled up with zeros too
//   i4        [panel][input / 4][16][4] bytes: output i in the low half, output 16 + i in the high one, 0 to 15
//
// Quantized weights have a scale for every thirty-two inputs of an output, and one for the output. Of eight bits: binary16
// [panel][group][32]. Of four bits: codes, u8 [panel][group][64], thirty-two square roots of scales, and then thirty-two
// zero points in sixteenths.
//
// Codes of five or six bits have what is above four behind a step's four bits, half of the panel after half: bit i of 64,
// or bits 2q and 2q + 1 of byte j of 16, belong to byte i = 16q + j of those that `load_codes` gives. Codes of two or three
// bits have such pairs of bits first, and then, of three, what is above them.
//
// An activation has a scale for every thirty-two inputs of a row. The facts of such a row are, one after the other, its
// scales, f32, and for each group -128 times the sum of its values, i32; then, where weights have groups of sixteen, the
// same of the first half of each group.
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

constexpr size_t dtype_bytes(DType type) {  // of a cache, or of a whole number of elements
  if (type == DType::kF32) return 4;
  return type == DType::kF16 || type == DType::kBF16 ? 2 : 1;
}

constexpr size_t code_bits(DType type) {
  constexpr size_t kBits[] = {32, 16, 16, 8, 4, 5, 6, 2, 3};
  return kBits[static_cast<size_t>(type)];
}

// operand roles (in[0..2] -> out); tensors; fields used
enum class OpKind : uint32_t {
  kEmbed,         // -> f32; table; in panels of integers with group scales and row scales, groups = Blocks, as below;
                  // window = rows, if they are not as many as tokens of the vocabulary: those behind them have the first
  kRmsNorm,       // x -> f32; weight of a group, or of all columns with window = 1; groups, scalar = eps
  kQuantize,      // x, row facts (written) -> i8, for kLinearInt8 and kLinearInt4; norm weight?, its bias?; before
  kLinear,        // x, residual? -> f32; weight, bias?
  kLinearInt8,    // x i8, residual?, row facts -> f32; weight u8, bias?, group scales f16, output scales
  kRopeTable,     // -> f32, cos then sin; inv_freq; head_dim = turned elements of a head, scalar = scale of both
  kCacheWrite,    // k, v, rope table of k?; layer, head_dim of its heads, 0: as the file says. One for each layer
  kAttention,     // q, rope table of q? -> f32; ALiBi slopes?, sinks?; layer, num_heads, window, scalar = scale, soft_cap,
                  // groups = 1: windows are stretches that begin at their multiples, 2: every token sees its whole chunk
  kGatedSilu,     // gate and up side by side -> f32
  kAdd,           // a, b -> f32
  kSelectRows,    // x, routes? -> f32; rows of kChosen are multiplied with the weights of routes
  kLinearInt4,    // as kLinearInt8; weight i4, and codes u8 instead of group scales
  kGatedGeluTanh,  // as kGatedSilu
  kGatedGelu,
  kScale,    // -> f32, in place; scalar = factor, or a tensor of one number
  kSoftCap,  // -> f32, in place; scalar = cap
  // router logits -> f32, numbers of experts in ascending order, then their weights; correction bias?,
  // factor of each expert?;
  // groups = kRouteToOne, kRouteSigmoid and kRouteByBest, scalar = factor of the weights, 0: none; soft_cap = tolerance of
  // SparseMixer; num_heads = groups of experts, 0: none, head_dim = groups to choose from
  kRoute,
  kDispatch,     // routes; groups = experts: which rows of kChosen are whose, for the operations up to the next one
  kCombine,      // rows of kChosen, routes -> f32; groups = 1: without weights
  kSigmoidGate,  // x, gate of one column or as many -> f32; groups = 1: times the gate, too
  kGatedClamped,  // as kGatedSilu
  kRope,          // x, rope table -> f32; heads of head_dim
  kLinearBlocks,  // as kLinearInt8; weight i2 to i6, and u8 instead of group scales; groups = Blocks
  kLayerNorm,     // x -> f32; weight and bias? of all columns; groups, scalar = eps
  kGelu,          // x -> f32
  kGeluTanh,
  kReluSquared,
  // x -> f32, times 1 + scalar * log(1 + floor((position + window) / groups))
  kScaleByPosition,
  kConvolution,  // x -> f32; weight of all columns, window numbers each, bias?; groups = 1: and then SiLU. Has a state
  kDeltaRule,    // q, k and v side by side, gates -> f32; decay, its bias; num_heads, groups = key heads, head_dim of keys.
                 // Has a state
  kMultiply,     // as kAdd; instead of b a tensor as long as a row
  kEmbedPosition,  // -> f32; table of floats, a row for each position
  kEmbedSegment,   // -> f32; table of floats, a row for each segment
  kPool,           // x of all tokens -> f32, a row for each chunk whose last token is selected;
                   // groups = Pool, plus kNormalized: divided by its length
  kSelectiveScan,  // x, b and c side by side, steps -> f32; decay, bias of steps, skip; num_heads, groups that share b and c,
                   // head_dim = rows of a head's state. Has a state
  kMix,            // x of `groups` groups of columns, z of groups as wide, coefficients? -> f32: each group of x from the
                   // one of number `window` on, plus the groups of z, each times its coefficient + scalar
  kSpread,         // x, z -> f32, side by side; the groups of z, which are as wide as x, have its mean square, each divided
                   // by its own, which is at least scalar
  kOverThreshold,  // x -> f32: what is over mean + scalar * standard deviation of the row, or 0
  kWithHidden,     // x -> f32, and beside it the token's row of the step's `hidden`
};

inline constexpr uint32_t kRouteToOne = 1;    // the weights of a row have a sum of one
inline constexpr uint32_t kRouteSigmoid = 2;  // scores are sigmoids of the logits, not their softmax
inline constexpr uint32_t kRouteByBest = 4;   // a group is as good as its best expert, not as its two best

inline constexpr uint32_t kInStretches = 1;     // of attention: what `groups` says
inline constexpr uint32_t kBidirectional = 2;

// What becomes of a chunk's rows.
enum class Pool : uint32_t { kFirst, kLast, kMean, kMax };
inline constexpr uint32_t kNormalized = 4;

// What thirty-two outputs have for blocks of inputs of a GGUF file, one after the other, after the codes: a weight is
// scale * code - minimum, or scale * a number of a table. Halves are binary16, scales and minima of groups bytes.
enum class Blocks : uint32_t {
  kScale,            // of 32 inputs: a half; the code in the middle is zero
  kScaleAndMinimum,  // of 32: the scale and minus the minimum, halves
  kScales,           // of 256: factors of scales and of minima, halves; for each 32 a scale and a minimum, u8
  kHalfScales,       // of 256: a factor, half; for each 16 a scale, i8; the code in the middle is zero
  kHalfScalesAndMinima,  // of 256: factors of scales and of minima, halves; for each 16 both in one u8, the scale low
  kUneven,           // of 32: a half; codes of kUnevenNumbers
  kUnevenScales,     // of 256: a factor, half; for each 32 a scale, i8; codes of kUnevenNumbers
  kExponent,         // of 32: a u8, of which 128 is one and less than 2 counts as 2; codes of kE2M1Numbers
};
inline constexpr uint32_t kNumBlocks = 8;
// Of IQ4_NL and IQ4_XS; and twice what four bits are as a float, of MXFP4.
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

// What an operation has rows for.
enum class RowsOf : uint32_t {
  kTokens,
  kSelected,  // tokens whose logits are wanted
  kChosen,    // each expert of each token, expert by expert; weights of linear layers are those of all experts, stacked
};

// What a quantization does to its rows first.
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

// Numbers that share a scale: inputs of activations and of weights, dimensions of keys.
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
  float soft_cap;  // of attention scores; 0: none
};
static_assert(sizeof(OpRecord) == 120);

struct TensorRecord {
  uint32_t dtype;
  uint32_t rows;  // 1 for a vector
  uint32_t cols;
  uint32_t layout;
  uint64_t offset;  // in the file
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
  uint64_t file_bytes;      // of the whole file
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
