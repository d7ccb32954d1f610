#include "program_check.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "kernels.h"
#include "record_check.h"

namespace llmserve {
namespace {

// Checks one op, by its kind.
class OpCheck : private RecordCheck {
 public:
  using RecordCheck::RecordCheck;

  bool run() {
    require(op_.rows <= static_cast<uint32_t>(RowsOf::kChosen) && std::isfinite(op_.scalar) && std::isfinite(op_.soft_cap) && op_.soft_cap >= 0.0f);
    if (!check_kind()) return false;
    require(!has(RowsOf::kChosen) || (for_experts_ && header_.experts_per_token > 0 && num_experts_ > 0));
    for (size_t i = 0; i < 3; ++i) require(used_[i] || op_.in[i].buffer == kNoBuffer);
    return ok_;
  }

 private:
  // Checks operands, tensors and fields of the op's kind; false if the kind is unknown.
  bool check_kind() {
    switch (static_cast<OpKind>(op_.kind)) {
      case OpKind::kEmbed:
        output(4);
        table(op_.window ? op_.window : header_.vocab_size);
        require(has(RowsOf::kTokens));
        return true;
      case OpKind::kEmbedPosition:
      case OpKind::kEmbedSegment:
        output(4);
        float_table(op_.kind == static_cast<uint32_t>(OpKind::kEmbedPosition) ? header_.max_seq_len : 1);
        return true;
      case OpKind::kPool:
        operand(op_.in[0], 4, 1);
        output(4);
        require(op_.in[0].width == op_.out.width && has(RowsOf::kSelected) && op_.groups < 2 * kNormalized);
        return true;
      case OpKind::kRmsNorm:
        same_width();
        require(op_.groups > 0 && op_.out.width % op_.groups == 0 && op_.window <= 1);
        if (ok_) vector(op_.tensors[0], DType::kF32, op_.window ? op_.out.width : op_.out.width / op_.groups);
        return true;
      case OpKind::kLayerNorm:
        same_width();
        require(op_.groups > 0 && op_.out.width % op_.groups == 0);
        vector(op_.tensors[0], DType::kF32, op_.out.width);
        optional_vector(op_.tensors[1], DType::kF32, op_.out.width);
        return true;
      case OpKind::kGelu:
      case OpKind::kGeluTanh:
      case OpKind::kReluSquared:
        same_width();
        for_experts_ = true;
        return true;
      case OpKind::kScaleByPosition:
        same_width();
        require(has(RowsOf::kTokens) && op_.groups > 0);
        return true;
      case OpKind::kLinear:
        linear(4);
        return true;
      case OpKind::kQuantize:
        quantize();
        return true;
      case OpKind::kLinearInt8:
        linear_grouped(DType::kI8);
        return true;
      case OpKind::kLinearInt4:
        linear_grouped(DType::kI4);
        return true;
      case OpKind::kLinearBlocks:
        linear_blocks();
        return true;
      case OpKind::kRopeTable:
        output(4);
        require(op_.out.width == op_.head_dim && op_.head_dim % 2 == 0 && op_.head_dim > 0);
        vector(op_.tensors[0], DType::kF32, op_.head_dim / 2);
        return true;
      case OpKind::kCacheWrite:
        cache_write();
        return true;
      case OpKind::kAttention:
        attention();
        return true;
      case OpKind::kGatedSilu:
      case OpKind::kGatedGeluTanh:
      case OpKind::kGatedGelu:
      case OpKind::kGatedClamped:
        operand(op_.in[0], 4);
        output(4);
        require(op_.in[0].width == uint64_t{op_.out.width} * 2);
        for_experts_ = true;
        return true;
      case OpKind::kMultiply:
        if (op_.in[1].buffer == kNoBuffer) {
          same_width();
          vector(op_.tensors[0], DType::kF32, op_.out.width);
          return true;
        }
        [[fallthrough]];
      case OpKind::kAdd:
        same_width();
        operand(op_.in[1], 4);
        require(op_.in[1].width == op_.out.width);
        return true;
      case OpKind::kMix:
        mix();
        return true;
      case OpKind::kSpread:
        spread();
        return true;
      case OpKind::kOverThreshold:
        same_width();
        return true;
      case OpKind::kWithHidden:
        operand(op_.in[0], 4);
        output(4);
        require(has(RowsOf::kTokens) && op_.in[0].width < op_.out.width && op_.in[0].buffer != op_.out.buffer);
        return true;
      case OpKind::kScale:
        output(4);
        optional_vector(op_.tensors[0], DType::kF32, 1);
        return true;
      case OpKind::kSoftCap:
        output(4);
        require(op_.scalar > 0.0f && op_.tensors[0] == kNoTensor);
        return true;
      case OpKind::kSelectRows:
        operand(op_.in[0], 4, 1);
        output(4);
        require(op_.in[0].width == op_.out.width && !has(RowsOf::kTokens));
        if (op_.in[1].buffer != kNoBuffer) {
          used_[1] = true;
          require(has(RowsOf::kChosen));
          routes(op_.in[1]);
        }
        for_experts_ = true;
        return true;
      case OpKind::kRoute:
        operand(op_.in[0], 4);
        routes(op_.out);
        require(has(RowsOf::kTokens) && op_.in[0].width >= header_.experts_per_token && op_.in[0].width <= kMaxExperts);
        require(op_.groups <= (kRouteToOne | kRouteSigmoid | kRouteByBest) && op_.scalar >= 0.0f);
        for (size_t i = 0; i < 2; ++i) optional_vector(op_.tensors[i], DType::kF32, op_.in[0].width);
        if (op_.num_heads != 0) expert_groups();
        return true;
      case OpKind::kDispatch:
        used_[0] = true;
        routes(op_.in[0]);
        require(has(RowsOf::kTokens) && op_.groups == num_experts_ && num_experts_ > 0 && num_experts_ <= kMaxExperts);
        return true;
      case OpKind::kCombine:
        operand(op_.in[0], 4, header_.experts_per_token);
        used_[1] = true;
        routes(op_.in[1]);
        output(4);
        require(has(RowsOf::kTokens) && op_.in[0].width == op_.out.width);
        return true;
      case OpKind::kSigmoidGate:
        same_width();
        operand(op_.in[1], 4);
        require((op_.in[1].width == 1 || op_.in[1].width == op_.out.width) && op_.groups <= 1);
        return true;
      case OpKind::kConvolution:
        same_width();
        require(has(RowsOf::kTokens) && op_.in[0].buffer != op_.out.buffer && op_.window > 1 && op_.window <= kMaxTaps);
        vector(op_.tensors[0], DType::kF32, uint64_t{op_.out.width} * op_.window);
        optional_vector(op_.tensors[1], DType::kF32, op_.out.width);
        return true;
      case OpKind::kDeltaRule:
        delta_rule();
        return true;
      case OpKind::kSelectiveScan:
        selective_scan();
        return true;
      case OpKind::kRope:
        same_width();
        require(op_.in[1].buffer != kNoBuffer && op_.out.width % header_.head_dim == 0 && has(RowsOf::kTokens));
        rope_table(op_.in[1], header_.head_dim);
        require(op_.in[0].buffer != op_.out.buffer);
        return true;
    }
    return false;
  }

  void linear(uint64_t input_bytes) {
    operand(op_.in[0], input_bytes);
    output(4);
    if (op_.in[1].buffer != kNoBuffer) {
      operand(op_.in[1], 4);
      require(op_.in[1].width == op_.out.width);
    }
    if (input_bytes == 4) matrix(op_.tensors[0], stacked(op_.out.width), op_.in[0].width);
    for_experts_ = op_.in[1].buffer == kNoBuffer && op_.out.width % kPanelColumns == 0;
    const TensorRecord* t = tensor(op_.tensors[0]);
    require(t && in_panels(*t));
    optional_vector(op_.tensors[1], DType::kF32, stacked(op_.out.width));
  }

  // Inputs: two vectors of head_dim for each group (such as query and key), then all heads' values; and gates.
  void heads_with_states() {
    for (const Operand& input : {std::ref(op_.in[0]), std::ref(op_.in[1])}) {
      operand(input, 4);
      require(input.buffer != op_.out.buffer);
    }
    output(4);
    require(has(RowsOf::kTokens) && op_.num_heads > 0 && op_.groups > 0 && op_.num_heads % op_.groups == 0 &&
            op_.out.width % op_.num_heads == 0);
    require(op_.head_dim > 0 && op_.head_dim <= kMaxHeadDim &&
            op_.in[0].width == uint64_t{2} * op_.groups * op_.head_dim + op_.out.width);
  }

  void selective_scan() {
    heads_with_states();
    require(op_.in[1].width == op_.num_heads);
    for (size_t i = 0; i < 3; ++i) vector(op_.tensors[i], DType::kF32, op_.num_heads);
  }

  void delta_rule() {
    heads_with_states();
    require(op_.in[1].width == uint64_t{2} * op_.num_heads);
    for (const int32_t of_heads : {op_.tensors[0], op_.tensors[1]}) vector(of_heads, DType::kF32, op_.num_heads);
  }

  // Width of the input in multiples of the quantized row's width; 0 for an unknown function.
  static uint64_t num_parts(Before before) {
    switch (before) {
      case Before::kNothing:
      case Before::kRmsNorm:
      case Before::kLayerNorm:
      case Before::kGelu:
      case Before::kGeluTanh:
      case Before::kReluSquared:
        return 1;
      case Before::kGatedSilu:
      case Before::kGatedGeluTanh:
      case Before::kGatedGelu:
      case Before::kGatedClamped:
        return 2;
    }
    return 0;
  }

  // Checks that groups have two experts or more, and that the chosen groups have enough experts.
  void expert_groups() {
    const uint32_t groups = op_.num_heads, width = op_.in[0].width;
    require(groups <= kMaxExpertGroups && width % groups == 0 && width >= 2 * groups && op_.soft_cap == 0.0f);
    require(op_.head_dim > 0 && op_.head_dim <= groups && width / groups * op_.head_dim >= header_.experts_per_token);
  }

  void quantize() {
    operand(op_.in[0], 4);
    operand(op_.in[1], 4);
    operand(op_.out, 1);
    const auto before = static_cast<Before>(op_.before);
    const uint64_t parts = num_parts(before);
    require(parts > 0 && op_.in[0].width == parts * op_.out.width);
    facts(op_.in[1], op_.out.width);
    const bool normed = before == Before::kLayerNorm;
    if (normed || before == Before::kRmsNorm) vector(op_.tensors[0], DType::kF32, op_.out.width);
    if (normed) optional_vector(op_.tensors[1], DType::kF32, op_.out.width);
    for_experts_ = true;
  }

  // Checks the weights' shape, and that the input can be read four bytes at a time.
  void quantized_input() {
    linear(1);
    operand(op_.in[2], 4);
    facts(op_.in[2], op_.in[0].width);
    require(op_.in[0].offset % 4 == 0 && op_.in[0].stride % 4 == 0);
  }

  // Facts of a quantized row, with or without those of half groups.
  void facts(const Operand& o, uint64_t width) {
    const uint64_t groups = num_quantized_groups(width);
    require(o.width == 2 * groups || o.width == 3 * groups);
  }

  void linear_blocks() {
    quantized_input();
    blocks({op_.tensors[0], op_.tensors[2], op_.tensors[3]}, stacked(op_.out.width), op_.in[0].width);
    const TensorRecord* t = tensor(op_.tensors[0]);
    const bool in_halves = t && in_half_groups(static_cast<DType>(t->dtype));
    require(!in_halves || op_.in[2].width == 3 * num_quantized_groups(op_.in[0].width));
  }

  // Like `integers`, for a GGUF file: whole blocks, and codes of a type that fits the blocks.
  void blocks(std::array<int32_t, 3> indices, uint64_t rows, uint64_t cols) {
    const TensorRecord* t = tensor(indices[0]);
    const TensorRecord* of_blocks = tensor(indices[1]);
    require(op_.groups < kNumBlocks && t && of_blocks);
    if (!ok_) return;
    const auto kind = static_cast<Blocks>(op_.groups);
    const auto type = static_cast<DType>(t->dtype);
    require(are_codes_of(kind, type));
    require(t->rows == rows && t->cols == cols && in_panels(*t) && cols % block_inputs(kind) == 0);
    const uint64_t panels = (rows + kPanelColumns - 1) / kPanelColumns;
    require(of_blocks->dtype == static_cast<uint32_t>(DType::kI8) && !in_panels(*of_blocks) &&
            of_blocks->rows == panels * (cols / block_inputs(kind)) && of_blocks->cols == block_bytes(kind));
    vector(indices[2], DType::kF32, rows);
  }

  void linear_grouped(DType type) {
    quantized_input();
    integers(type, {op_.tensors[0], op_.tensors[2], op_.tensors[3]}, stacked(op_.out.width), op_.in[0].width);
  }

  // Checks weights [rows, cols] in panels, the data of their groups, and the scales of rows.
  void integers(DType type, std::array<int32_t, 3> indices, uint64_t rows, uint64_t cols) {
    const TensorRecord* t = tensor(indices[0]);
    require(t && t->dtype == static_cast<uint32_t>(type) && t->rows == rows && t->cols == cols && in_panels(*t));
    const uint64_t panels = (rows + kPanelColumns - 1) / kPanelColumns;
    const TensorRecord* scales = tensor(indices[1]);
    const bool codes = type == DType::kI4;
    require(scales && scales->dtype == static_cast<uint32_t>(codes ? DType::kI8 : DType::kF16) &&
            scales->rows == panels * num_quantized_groups(cols) &&
            scales->cols == (codes ? 2 : 1) * kPanelColumns && !in_panels(*scales));
    vector(indices[2], DType::kF32, rows);
  }

  // Floats in rows, or in the panels of a tied head; or integers in panels.
  void table(uint64_t rows) {
    if (op_.tensors[1] == kNoTensor && op_.tensors[2] == kNoTensor) return matrix(op_.tensors[0], rows, op_.out.width);
    const std::array<int32_t, 3> indices = {op_.tensors[0], op_.tensors[1], op_.tensors[2]};
    const TensorRecord* t = tensor(indices[0]);
    if (t && t->dtype > static_cast<uint32_t>(DType::kI8)) return blocks(indices, rows, op_.out.width);
    integers(DType::kI8, indices, rows, op_.out.width);
  }

  // A table of at least `least` rows, which are looked up by number.
  void float_table(uint64_t least) {
    const TensorRecord* t = tensor(op_.tensors[0]);
    require(t && t->dtype <= static_cast<uint32_t>(DType::kBF16) && t->rows >= least && t->cols == op_.out.width &&
            !in_panels(*t) && op_.tensors[1] == kNoTensor && op_.tensors[2] == kNoTensor && has(RowsOf::kTokens));
  }

  // The rope table for heads or the first part of each; may be absent.
  void rope_table(const Operand& table, uint64_t head_dim) {
    if (table.buffer == kNoBuffer) return;
    operand(table, 4);
    require(table.width <= head_dim && table.width % 2 == 0);
  }

  // Checks that it is the only one of its layer and that its blocks are not larger than the file's.
  void cache_write() {
    for (const Operand& kept : {std::ref(op_.in[0]), std::ref(op_.in[1])}) operand(kept, 4);
    require(op_.layer < header_.num_layers && has(RowsOf::kTokens) && file_.cache_write(op_.layer) == &op_);
    require(op_.head_dim <= kMaxHeadDim && op_.in[0].width == op_.in[1].width);
    if (!ok_) return;
    const CacheShape shape = file_.cache_shape(op_);
    require(shape.num_kv_heads > 0 && op_.in[0].width == shape.num_kv_heads * shape.head_dim &&
            shape.num_kv_heads * shape.head_bytes() <= shape.stride);
    rope_table(op_.in[2], shape.head_dim);
  }

  void attention() {
    operand(op_.in[0], 4);
    output(4);
    const OpRecord* write = file_.cache_write(op_.layer);
    require(op_.in[0].width == op_.out.width && op_.layer < header_.num_layers && has(RowsOf::kTokens) && write);
    const CacheShape shape = write ? file_.cache_shape(*write) : file_.cache_shape();
    rope_table(op_.in[1], shape.head_dim);
    require(op_.num_heads > 0 && shape.num_kv_heads > 0 && op_.num_heads % shape.num_kv_heads == 0 &&
            op_.out.width == uint64_t{op_.num_heads} * shape.head_dim);
    require(op_.groups == 0 || (op_.groups == kInStretches && op_.window > 0) ||
            (op_.groups == kBidirectional && op_.window == 0 && op_.tensors[0] == kNoTensor));
    for (const int32_t of_heads : {op_.tensors[0], op_.tensors[1]}) optional_vector(of_heads, DType::kF32, op_.num_heads);
  }
};

}  // namespace

Error check_program(const EngineFile& file) {
  const auto ops = file.ops();
  const auto mixture = std::ranges::find(ops, static_cast<uint32_t>(OpKind::kDispatch), &OpRecord::kind);
  const uint32_t num_experts = mixture == ops.end() ? 0 : mixture->groups;
  for (size_t i = 0; i < ops.size(); ++i) {
    if (!OpCheck(file, ops[i], num_experts).run()) return bad_file("has a damaged record of operation " + std::to_string(i));
  }
  const auto writes_logits = [](const OpRecord& op) { return op.out.buffer == kLogitsBuffer; };
  if (!writes_logits(ops.back())) return bad_file("does not end in logits");
  if (!std::ranges::is_partitioned(ops, std::not_fn(writes_logits))) return bad_file("goes on after its logits");
  const bool pools = std::ranges::find(ops, static_cast<uint32_t>(OpKind::kPool), &OpRecord::kind) != ops.end();
  if (!pools && ops.back().out.width > file.header().vocab_size) return bad_file("has logits of another vocabulary");
  return {};
}

}  // namespace llmserve
