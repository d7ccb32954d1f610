// Checks of the operands and tensors of one operation of an engine file.
#pragma once

#include "engine_file.h"

namespace llmserve {

// Each failed check sets `ok_` to false.
class RecordCheck {
 public:
  RecordCheck(const EngineFile& file, const OpRecord& op, uint32_t num_experts)
      : file_(file), header_(file.header()), op_(op), num_experts_(num_experts), output_width_(file.ops().back().out.width) {}

 protected:
  void require(bool holds) { ok_ = ok_ && holds; }

  bool has(RowsOf rows) const { return op_.rows == static_cast<uint32_t>(rows); }

  uint64_t rows_per_token() const { return has(RowsOf::kChosen) ? header_.experts_per_token : 1; }

  // Checks an operand that holds the numbers and weights of a token's experts.
  void routes(const Operand& o) {
    operand(o, 4, 1);
    require(header_.experts_per_token > 0 && o.width == 2 * header_.experts_per_token);
  }

  // Rows of a weight that produces `columns` columns.
  uint64_t stacked(uint64_t columns) const { return has(RowsOf::kChosen) ? columns * num_experts_ : columns; }

  // Checks that a view with elements of `bytes` each is inside its buffer.
  void operand(const Operand& o, uint64_t bytes) { operand(o, bytes, rows_per_token()); }
  void operand(const Operand& o, uint64_t bytes, uint64_t rows) {
    if (&o != &op_.out) used_[&o - op_.in] = true;
    if (o.buffer < 0 || static_cast<uint32_t>(o.buffer) >= header_.num_buffers) return require(false);
    const uint64_t capacity = file_.buffers()[static_cast<size_t>(o.buffer)].bytes_per_row;
    require(o.width > 0 && uint64_t{o.offset} + o.width <= o.stride && o.stride * bytes * rows <= capacity);
  }

  // Checks the output, which may also be the logits.
  void output(uint64_t bytes) {
    if (op_.out.buffer != kLogitsBuffer) return operand(op_.out, bytes);
    require(has(RowsOf::kSelected) && op_.out.offset == 0 && op_.out.width == output_width_ &&
            op_.out.stride == output_width_);
  }

  void same_width() {
    operand(op_.in[0], 4);
    output(4);
    require(op_.in[0].width == op_.out.width);
  }

  const TensorRecord* tensor(int32_t index) {
    if (index < 0 || static_cast<uint32_t>(index) >= header_.num_tensors) {
      require(false);
      return nullptr;
    }
    return &file_.tensors()[static_cast<size_t>(index)];
  }

  static bool in_panels(const TensorRecord& t) { return t.layout == static_cast<uint32_t>(Layout::kPanels); }

  void vector(int32_t index, DType type, uint64_t count) {
    const TensorRecord* t = tensor(index);
    require(t && t->dtype == static_cast<uint32_t>(type) && t->rows == 1 && t->cols == count && !in_panels(*t));
  }

  void optional_vector(int32_t index, DType type, uint64_t count) {
    if (index != kNoTensor) vector(index, type, count);
  }

  void matrix(int32_t index, uint64_t rows, uint64_t cols) {
    const TensorRecord* t = tensor(index);
    require(t && t->dtype <= static_cast<uint32_t>(DType::kBF16) && t->rows == rows && t->cols == cols);
  }

  // Checks streams that are side by side, to which others of the same width are added.
  void mix() {
    same_width();
    operand(op_.in[1], 4);
    require(op_.groups > 0 && op_.out.width % op_.groups == 0 && op_.window < op_.groups);
    if (!ok_) return;
    const uint64_t width = op_.out.width / op_.groups, others = op_.in[1].width / width;
    require(op_.in[1].width % width == 0);
    if (op_.in[2].buffer != kNoBuffer) {
      operand(op_.in[2], 4);
      require(op_.in[2].width == op_.groups * others && op_.in[2].buffer != op_.out.buffer);
    }
    require(op_.out.buffer != op_.in[1].buffer);
  }

  // Checks the concatenation of x and groups of the same width.
  void spread() {
    for (size_t i = 0; i < 2; ++i) {
      operand(op_.in[i], 4);
      require(op_.out.buffer != op_.in[i].buffer);
    }
    output(4);
    require(op_.scalar > 0.0f && op_.out.width == uint64_t{op_.in[0].width} + op_.in[1].width);
    if (ok_) require(op_.in[1].width % op_.in[0].width == 0);
  }

  const EngineFile& file_;
  const FileHeader& header_;
  const OpRecord& op_;
  const uint32_t num_experts_;  // the same for every mixture
  const uint32_t output_width_;  // width of the logits, or of the pooled rows
  bool for_experts_ = false;  // whether an op of this kind, with these operands, can work on rows of experts
  bool used_[3] = {};  // inputs that an op of this kind reads or writes
  bool ok_ = true;
};

}  // namespace llmserve
