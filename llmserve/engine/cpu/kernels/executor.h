// Runs the op table of an engine for one step. Every thread executes all ops; the threads share the work of each op.
//
// Logits are wide, and log-probs of a prompt need those of every token. So the ops that write logits, and the requests
// that read them, process the selected rows in pieces for which the engine has room.
#pragma once

#include <span>
#include <utility>

#include "engine.h"

namespace llmserve {

class Executor {
 public:
  Executor(Engine& engine, const StepRecord& step, unsigned thread)
      : engine_(engine), header_(engine.file_.header()), step_(step), thread_(thread) {}

  void run();

 private:
  void execute(const OpRecord& op, TaskCounter& tasks);
  void linear(const OpRecord& op, TaskCounter& tasks);
  void linear_grouped(const OpRecord& op, TaskCounter& tasks, decltype(KernelTable::linear_int8) kernel);
  void rope_table(const OpRecord& op, size_t begin, size_t end);
  void attention(const OpRecord& op, TaskCounter& tasks);
  void select_rows(const OpRecord& op, size_t begin, size_t end);
  void hand_out(const OpRecord& op, size_t begin, size_t end);
  void with_hidden(const OpRecord& op, size_t begin, size_t end);
  void embed(const OpRecord& op, size_t begin, size_t end, const int32_t* ids);
  void pool(const OpRecord& op, size_t begin, size_t end);
  void rms_norm(const OpRecord& op, size_t begin, size_t end);
  LayerNormArgs layer_norm_args(const OpRecord& op, size_t groups) const;
  void layer_norm(const OpRecord& op, size_t begin, size_t end);
  void activate(const OpRecord& op, size_t begin, size_t end, decltype(KernelTable::gelu) kernel);
  void pairwise(const OpRecord& op, size_t begin, size_t end, decltype(KernelTable::add) kernel);
  void route(const OpRecord& op, size_t begin, size_t end);
  void dispatch(const OpRecord& op);
  float weight_of(const Operand& routes, size_t row) const;
  void combine(const OpRecord& op, size_t begin, size_t end);
  void sigmoid_gate(const OpRecord& op, size_t begin, size_t end);
  void convolution(const OpRecord& op, TaskCounter& tasks);
  void delta_rule(const OpRecord& op, TaskCounter& tasks);
  void selective_scan(const OpRecord& op, TaskCounter& tasks);
  template <class Fn>
  void over_runs(const OpRecord& op, const ChunkRecord& chunk, Fn fn) const;
  template <class Args, class Fn>
  void over_head_panels(const OpRecord& op, TaskCounter& tasks, Args args, Fn fn) const;
  void scale_by_position(const OpRecord& op, size_t begin, size_t end);
  void multiply_columns(const OpRecord& op, size_t begin, size_t end);
  void mix(const OpRecord& op, size_t begin, size_t end);
  void spread(const OpRecord& op, size_t begin, size_t end);
  void over_threshold(const OpRecord& op, size_t begin, size_t end);
  void rope(const OpRecord& op, size_t begin, size_t end);
  void quantize(const OpRecord& op, size_t begin, size_t end, float* scratch);
  View<const float> before_quantization(const OpRecord& op, View<const float> x, float* scratch) const;
  void in_place(const OpRecord& op, TaskCounter& tasks, decltype(KernelTable::scale) kernel);
  void cache_write(const OpRecord& op, size_t begin, size_t end);
  void use_logits(TaskCounter& tasks);
  size_t num_adapted(size_t op) const;
  void begin_adapters(const OpRecord& op, size_t index, size_t num_pieces);
  void add_adapters(const OpRecord& op, size_t index, size_t num_pieces, size_t begin, size_t end);
  void multiply(const LinearArgs& args, size_t begin, size_t end) const;
  void read_integers(const OpRecord& op, const AdapterRows& rows, View<float> y) const;

  bool is_head(const OpRecord& op) const { return op.out.buffer == kLogitsBuffer; }
  size_t num_rows(const OpRecord& op) const {
    if (is_head(op)) return piece_rows_;
    if (rows_of(op) == RowsOf::kChosen) return size_t{step_.num_tokens} * header_.experts_per_token;
    return rows_of(op) == RowsOf::kSelected ? step_.num_selected : step_.num_tokens;
  }
  // Whether this op also hands out the head's inputs for all tokens, which the step requested.
  bool hands_out(const OpRecord& op) const {
    return step_.hidden_out && op.kind == static_cast<uint32_t>(OpKind::kSelectRows) && rows_of(op) == RowsOf::kSelected;
  }
  static RowsOf rows_of(const OpRecord& op) { return static_cast<RowsOf>(op.rows); }
  // The first row of an op's inputs.
  size_t first_row(const OpRecord& op) const { return is_head(op) ? piece_begin_ : 0; }
  template <class Fn>
  void over_panels(const OpRecord& op, TaskCounter& tasks, Fn fn);
  template <class Fn>
  void over_experts(const OpRecord& op, TaskCounter& tasks, Fn fn);
  QuantizedRows quantized_rows(const Operand& values, const Operand& facts, size_t first_row) const;
  template <class T>
  const T* of_stack(int32_t tensor, size_t expert) const;
  float* scratch() const;
  size_t tactic(const OpRecord& op, size_t num_rows) const;
  std::byte* cache_plane(uint32_t layer, uint32_t values) const;

  template <class T>
  View<T> view(const Operand& operand, size_t first_row = 0) const;

  Engine& engine_;
  const FileHeader& header_;
  const StepRecord& step_;
  const unsigned thread_;
  uint32_t piece_begin_ = 0;  // first selected row of the current piece
  uint32_t piece_rows_ = 0;
};

template <class T>
View<T> Executor::view(const Operand& operand, size_t first_row) const {
  std::byte* base = nullptr;
  if (operand.buffer == kNoBuffer) return {};
  if (operand.buffer == kLogitsBuffer) {
    base = engine_.logits_.data();
  } else {
    base = engine_.activations_.data() + engine_.buffer_offsets_[static_cast<size_t>(operand.buffer)];
  }
  return {reinterpret_cast<T*>(base) + operand.offset + first_row * operand.stride, operand.stride};
}

}  // namespace llmserve
