// Ops that depend on the positions of tokens.
#include <cmath>

#include "executor.h"

namespace llmserve {

// Computes angles in f32, as transformers does, and their cosines and sines in f64.
void Executor::rope_table(const OpRecord& op, size_t begin, size_t end) {
  const float* inv_freq = engine_.file_.tensor<float>(op.tensors[0]);
  const size_t half = op.head_dim / 2;
  const auto table = view<float>(op.out);
  for (size_t r = begin; r < end; ++r) {
    const auto position = static_cast<float>(engine_.positions_[r]);
    float* row = table.row(r);
    for (size_t i = 0; i < half; ++i) {
      const double angle = inv_freq[i] * position;
      row[i] = static_cast<float>(std::cos(angle)) * op.scalar;
      row[half + i] = static_cast<float>(std::sin(angle)) * op.scalar;
    }
  }
}

// Computes the factor in f64, from a whole number of intervals, so that every machine rounds it in the same way.
void Executor::scale_by_position(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0]);
  const auto y = view<float>(op.out);
  for (size_t r = begin; r < end; ++r) {
    const uint64_t intervals = (uint64_t{static_cast<uint32_t>(engine_.positions_[r])} + op.window) / op.groups;
    const double grown = std::log(1.0 + static_cast<double>(intervals));
    const auto factor = static_cast<float>(1.0 + double{op.scalar} * grown);
    for (size_t i = 0; i < op.out.width; ++i) y.row(r)[i] = x.row(r)[i] * factor;
  }
}

void Executor::rope(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0], begin), table = view<const float>(op.in[1], begin);
  engine_.kernels_->rope(x, table, op.in[1].width, header_.head_dim, op.out.width, end - begin, view<float>(op.out, begin));
}

}  // namespace llmserve
