// Adapters within a step: behind a linear layer, what the rows that have an adapter add to its output.
#include <algorithm>

#include "executor.h"

namespace llmserve {
namespace {

constexpr size_t kUpPanels = 16;  // of one piece

size_t num_panels(size_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

}  // namespace

// fn(rows, part, piece) for the `pieces(part)` pieces of every part that the step's adapters have for an operation.
template <class Pieces, class Fn>
void Executor::over_adapters(size_t op, TaskCounter& tasks, Pieces pieces, Fn fn) {
  const std::span<const AdapterRows> all = engine_.adapters_.rows();
  size_t count = 0;
  for (const AdapterRows& rows : all) {
    for (const AdapterPart& part : rows.adapter->of(op)) count += pieces(part);
  }
  tasks.for_pieces(count, 1, [&](size_t index, size_t) {
    for (const AdapterRows& rows : all) {
      for (const AdapterPart& part : rows.adapter->of(op)) {
        if (index < pieces(part)) return fn(rows, part, index);
        index -= pieces(part);
      }
    }
  });
}

// Three loops: inputs as floats, the inner numbers, and the outputs.
void Executor::add_adapters(const OpRecord& op, size_t index) {
  if (engine_.adapters_.rows().empty()) return;
  TaskCounter* tasks = engine_.adapter_counters_.get() + 3 * index;
  const KernelTable& kernels = *engine_.kernels_;
  auto x = view<const float>(op.in[0]);
  if (static_cast<OpKind>(op.kind) != OpKind::kLinear) {
    const View<float> inputs = engine_.adapters_.inputs();
    const auto once = [&](const AdapterRows& rows) { return rows.adapter->of(index).empty() ? size_t{0} : size_t{1}; };
    size_t count = 0;
    for (const AdapterRows& rows : engine_.adapters_.rows()) count += once(rows);
    tasks[0].for_pieces(count, 1, [&](size_t place, size_t) {
      for (const AdapterRows& rows : engine_.adapters_.rows()) {
        if (once(rows) && place-- == 0) return read_integers(op, rows, inputs);
      }
    });
    x = {inputs.data, inputs.stride};
  }
  const View<float> inner = engine_.adapters_.inner();
  const auto multiply = [&](const LinearArgs& args, size_t begin, size_t end) {
    kernels.linear(args, default_tactic(kernels.float_tactics, row_bucket(args.num_rows)), begin, end);
  };
  over_adapters(index, tasks[1], [](const AdapterPart&) { return size_t{1}; },
                [&](const AdapterRows& rows, const AdapterPart& part, size_t) {
                  const AdapterPartRecord& p = part.record;
                  const View<float> y = {inner.row(rows.begin) + part.inner, inner.stride};
                  multiply({.x = {x.row(rows.begin), x.stride}, .num_rows = rows.count, .depth = p.depth, .columns = p.rank,
                            .weight = p.down, .weight_type = static_cast<DType>(p.dtype), .bias = nullptr, .residual = {},
                            .y = y}, 0, num_panels(p.rank));
                });
  const auto up_pieces = [](const AdapterPart& part) { return (num_panels(part.record.columns) + kUpPanels - 1) / kUpPanels; };
  over_adapters(index, tasks[2], up_pieces, [&](const AdapterRows& rows, const AdapterPart& part, size_t piece) {
    const AdapterPartRecord& p = part.record;
    const auto out = view<float>(op.out, rows.begin);
    const View<float> y = {out.data + p.first_column, out.stride};
    const View<const float> t = {inner.row(rows.begin) + part.inner, inner.stride};
    multiply({.x = t, .num_rows = rows.count, .depth = p.rank, .columns = p.columns, .weight = p.up,
              .weight_type = static_cast<DType>(p.dtype), .bias = nullptr, .residual = {y.data, y.stride}, .y = y},
             piece * kUpPanels, std::min(num_panels(p.columns), (piece + 1) * kUpPanels));
  });
}

// What a layer of integers reads, as the floats that they stand for.
void Executor::read_integers(const OpRecord& op, const AdapterRows& rows, View<float> y) const {
  for (size_t row = rows.begin; row < rows.begin + rows.count; ++row) {
    const QuantizedRows x = quantized_rows(op.in[0], op.in[2], row);
    const int8_t* values = x.values.data;
    float* out = y.row(row);
    const auto expand = [&](size_t begin, size_t count) {
      const float scale = x.scales.data[begin / kQuantizedGroup];
      for (size_t i = begin; i < begin + count; ++i) out[i] = static_cast<float>(values[i]) * scale;
    };
    // Whole groups have a constant length, so that the compiler uses vectors.
    size_t begin = 0;
    for (; begin + kQuantizedGroup <= op.in[0].width; begin += kQuantizedGroup) expand(begin, kQuantizedGroup);
    if (begin < op.in[0].width) expand(begin, op.in[0].width - begin);
  }
}

}  // namespace llmserve
