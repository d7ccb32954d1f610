// Adapters in a step: what they add to the output of a linear layer, for the rows that have one.
#include <algorithm>

#include "executor.h"

namespace llmserve {
namespace {

size_t num_panels(size_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

}  // namespace

// Number of pieces of the step's rows whose adapter changes this operation.
size_t Executor::num_adapted(size_t op) const {
  return static_cast<size_t>(std::ranges::count_if(
      engine_.adapters_.rows(), [&](const AdapterRows& rows) { return !rows.adapter->of(op).empty(); }));
}

void Executor::multiply(const LinearArgs& args, size_t begin, size_t end) const {
  const KernelTable& kernels = *engine_.kernels_;
  kernels.linear(args, default_tactic(kernels.float_tactics, row_bucket(args.num_rows)), begin, end);
}

// Begins to compute the inner numbers of an operation, for each of the pieces. `add_adapters` waits for them.
void Executor::begin_adapters(const OpRecord& op, size_t index, size_t num_pieces) {
  if (num_pieces == 0) return;
  const bool integers = static_cast<OpKind>(op.kind) != OpKind::kLinear;
  const View<float> expanded = engine_.adapters_.inputs();
  const View<const float> x = integers ? View<const float>{expanded.data, expanded.stride} : view<const float>(op.in[0]);
  const View<float> inner = engine_.adapters_.inner();
  engine_.adapter_counters_[index].begin_pieces(num_pieces, 1, [&](size_t place, size_t) {
    for (const AdapterRows& rows : engine_.adapters_.rows()) {
      if (rows.adapter->of(index).empty() || place-- > 0) continue;
      if (integers) read_integers(op, rows, expanded);
      const AdapterPartRecord& part = rows.adapter->of(index).front();
      return multiply({.x = {x.row(rows.begin), x.stride}, .num_rows = rows.count, .depth = part.depth,
                       .columns = part.num_ranks, .weight = part.down, .weight_type = static_cast<DType>(part.dtype),
                       .bias = nullptr, .residual = {}, .y = {inner.row(rows.begin), inner.stride}},
                      0, num_panels(part.num_ranks));
    }
  });
}

// Adds the contributions of adapters to panels [begin, end) of an operation, which already have its own result.
void Executor::add_adapters(const OpRecord& op, size_t index, size_t num_pieces, size_t begin, size_t end) {
  if (num_pieces == 0) return;
  engine_.adapter_counters_[index].wait(num_pieces);
  const View<float> inner = engine_.adapters_.inner();
  for (const AdapterRows& rows : engine_.adapters_.rows()) {
    for (const AdapterPartRecord& part : rows.adapter->of(index)) {
      const size_t first = part.first_column / kPanelColumns;
      const size_t from = std::max(begin, first), to = std::min(end, first + num_panels(part.columns));
      if (from >= to) continue;
      const auto out = view<float>(op.out, rows.begin);
      const View<float> y = {out.data + part.first_column, out.stride};
      const View<const float> t = {inner.row(rows.begin) + part.first_rank, inner.stride};
      multiply({.x = t, .num_rows = rows.count, .depth = part.rank, .columns = part.columns, .weight = part.up,
                .weight_type = static_cast<DType>(part.dtype), .bias = nullptr, .residual = {y.data, y.stride}, .y = y},
               from - first, to - first);
    }
  }
}

// Dequantizes the input of an integer layer.
void Executor::read_integers(const OpRecord& op, const AdapterRows& rows, View<float> y) const {
  for (size_t row = rows.begin; row < rows.begin + rows.count; ++row) {
    const QuantizedRows x = quantized_rows(op.in[0], op.in[2], row);
    const int8_t* values = x.values.data;
    float* out = y.row(row);
    const auto expand = [&](size_t begin, size_t count) {
      const float scale = x.scales.data[begin / kQuantizedGroup];
      for (size_t i = begin; i < begin + count; ++i) out[i] = static_cast<float>(values[i]) * scale;
    };
    // Whole groups have a constant length, so that the compiler vectorizes them.
    size_t begin = 0;
    for (; begin + kQuantizedGroup <= op.in[0].width; begin += kQuantizedGroup) expand(begin, kQuantizedGroup);
    if (begin < op.in[0].width) expand(begin, op.in[0].width - begin);
  }
}

}  // namespace llmserve
