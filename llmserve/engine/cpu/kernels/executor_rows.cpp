// Ops that read rows from tables or from other rows.
#include <algorithm>
#include <cmath>
#include <span>

#include "executor.h"

namespace llmserve {
namespace {

// Adds rows [begin, end) to y, or takes the maximum: row by row in order, each column by itself.
void gather(View<const float> x, size_t begin, size_t end, Pool kind, std::span<float> y) {
  for (size_t row = begin; row < end; ++row) {
    const float* other = x.row(row);
    for (size_t i = 0; i < y.size(); ++i) y[i] = kind == Pool::kMean ? y[i] + other[i] : std::max(y[i], other[i]);
  }
}

void divide(std::span<float> y, float divisor) {
  for (float& value : y) value /= divisor;
}

// Scales y to a length of one. Squares are summed in f64; a row of zeros stays zero.
void normalize(std::span<float> y) {
  double sum = 0.0;
  for (float value : y) sum += double{value} * double{value};
  divide(y, static_cast<float>(std::max(std::sqrt(sum), 1e-12)));
}

}  // namespace

void Executor::embed(const OpRecord& op, size_t begin, size_t end, const int32_t* ids) {
  const TensorRecord& table = engine_.file_.record(op.tensors[0]);
  const EmbedArgs args = {engine_.file_.tensor<void>(op.tensors[0]), static_cast<DType>(table.dtype),
                          static_cast<Layout>(table.layout), op.out.width, engine_.file_.tensor<void>(op.tensors[1]),
                          engine_.file_.tensor<float>(op.tensors[2]), static_cast<Blocks>(op.groups)};
  const auto y = view<float>(op.out, begin);
  if (op.window == 0) return engine_.kernels_->embed(args, ids + begin, end - begin, y);
  for (size_t r = begin; r < end; ++r) {
    const int32_t id = static_cast<uint32_t>(ids[r]) < op.window ? ids[r] : 0;
    engine_.kernels_->embed(args, &id, 1, view<float>(op.out, r));
  }
}

void Executor::multiply_columns(const OpRecord& op, size_t begin, size_t end) {
  const View<const float> weights = {engine_.file_.tensor<float>(op.tensors[0]), 0};  // the same for every row
  const auto x = view<const float>(op.in[0], first_row(op) + begin);
  engine_.kernels_->multiply(x, weights, op.out.width, end - begin, view<float>(op.out, begin));
}

void Executor::mix(const OpRecord& op, size_t begin, size_t end) {
  const size_t first = first_row(op) + begin, width = op.out.width / op.groups;
  const MixArgs args = {view<const float>(op.in[0], first), view<const float>(op.in[1], first),
                        view<const float>(op.in[2], first), op.groups, op.in[1].width / width, width, op.window,
                        op.scalar, view<float>(op.out, begin)};
  engine_.kernels_->mix(args, end - begin);
}

void Executor::spread(const OpRecord& op, size_t begin, size_t end) {
  const size_t first = first_row(op) + begin, width = op.in[0].width;
  engine_.kernels_->spread(view<const float>(op.in[0], first), width, view<const float>(op.in[1], first),
                           op.in[1].width / width, op.scalar, end - begin, view<float>(op.out, begin));
}

void Executor::over_threshold(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0], first_row(op) + begin);
  engine_.kernels_->over_threshold(x, op.scalar, op.out.width, end - begin, view<float>(op.out, begin));
}

void Executor::select_rows(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0]);
  const auto y = view<float>(op.out);
  for (size_t r = begin; r < end; ++r) {
    const bool chosen = rows_of(op) == RowsOf::kChosen;
    const float* source = x.row(chosen ? engine_.dispatch_.tokens[r] : step_.selected_rows[first_row(op) + r]);
    if (op.in[1].buffer == kNoBuffer) {
      std::copy(source, source + op.out.width, y.row(r));
    } else {
      const float weight = weight_of(op.in[1], r);
      for (size_t i = 0; i < op.out.width; ++i) y.row(r)[i] = source[i] * weight;
    }
  }
}

// Hands out the head's inputs of every token, and selects rows as usual. The norm is the one of the next operation.
void Executor::hand_out(const OpRecord& op, size_t begin, size_t end) {
  const OpRecord& norm = (&op)[1];
  const size_t width = op.out.width;
  engine_.kernels_->rms_norm(view<const float>(op.in[0], begin), engine_.file_.tensor<float>(norm.tensors[0]), false,
                             norm.scalar, 1, width, end - begin, {step_.hidden_out + begin * width, width});
  const size_t selected = step_.num_selected;
  select_rows(op, std::min(begin, selected), std::min(end, selected));
}

void Executor::with_hidden(const OpRecord& op, size_t begin, size_t end) {
  const size_t width = op.in[0].width, added = op.out.width - width;
  for (size_t row = begin; row < end; ++row) {
    float* y = view<float>(op.out, row).data;
    std::copy_n(view<const float>(op.in[0], row).data, width, y);
    std::copy_n(step_.hidden + row * added, added, y + width);
  }
}

void Executor::pool(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0]);
  const auto kind = static_cast<Pool>(op.groups % kNormalized);
  const auto begins_later = [](uint32_t row, const ChunkRecord& chunk) { return row < chunk.first_token; };
  for (size_t r = begin; r < end; ++r) {
    const uint32_t last = step_.selected_rows[first_row(op) + r];
    const ChunkRecord* chunks_end = step_.chunks + step_.num_chunks;
    const size_t first = (std::upper_bound(step_.chunks, chunks_end, last, begins_later) - 1)->first_token;
    const std::span<float> y(view<float>(op.out).row(r), op.out.width);
    std::copy_n(x.row(kind == Pool::kLast ? last : first), y.size(), y.data());
    if (kind == Pool::kMean || kind == Pool::kMax) gather(x, first + 1, last + size_t{1}, kind, y);
    if (kind == Pool::kMean) divide(y, static_cast<float>(last + 1 - first));
    if (op.groups >= kNormalized) normalize(y);
  }
}

}  // namespace llmserve
