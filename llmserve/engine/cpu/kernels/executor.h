// Runs the op table of an engine over one step. Every thread executes all ops; the work inside each is shared out.
#pragma once

#include <utility>

#include "engine.h"

namespace llmserve {

class Executor {
 public:
  Executor(Engine& engine, const StepRecord& step) : engine_(engine), header_(engine.file_.header()), step_(step) {}

  void run(unsigned thread);

 private:
  void execute(const OpRecord& op, TaskCounter& tasks, unsigned thread);
  void linear(const OpRecord& op, TaskCounter& tasks);
  void linear_grouped(const OpRecord& op, TaskCounter& tasks, decltype(KernelTable::linear_int8) kernel);
  void rope_table(const OpRecord& op, size_t begin, size_t end);
  void attention(const OpRecord& op, TaskCounter& tasks, unsigned thread);
  void select_rows(const OpRecord& op, size_t begin, size_t end);
  void rows(const OpRecord& op, size_t begin, size_t end);
  void quantize(const OpRecord& op, size_t begin, size_t end, float* scratch);
  void in_place(const OpRecord& op, TaskCounter& tasks);
  void cache_write(const OpRecord& op, size_t begin, size_t end);
  void sample(TaskCounter& tasks, unsigned thread);

  size_t num_rows(const OpRecord& op) const { return op.selected ? step_.num_selected : step_.num_tokens; }
  template <class Fn>
  void over_panels(const OpRecord& op, TaskCounter& tasks, Fn fn);
  QuantizedRows quantized_rows(const Operand& values, const Operand& facts, size_t first_row) const;
  float* scratch(unsigned thread) const;
  size_t tactic(const OpRecord& op) const;
  float* logits() const;
  std::byte* cache_plane(uint32_t layer, uint32_t values) const;

  template <class T>
  View<T> view(const Operand& operand, size_t first_row = 0) const;

  Engine& engine_;
  const FileHeader& header_;
  const StepRecord& step_;
};

}  // namespace llmserve
