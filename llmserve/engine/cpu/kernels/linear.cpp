// y = x @ weight.T for float weights of three widths, converted to f32 in registers.
//
// Order of one output: sixteen partial sums over the depth in steps of sixteen (one FMA each), a zero-filled last step,
// then the tree of `reduce_add`. Tiles only choose how many outputs share their loads.
#include "simd.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// Rows that pass over one task's columns together: few enough to stay in the second-level cache.
constexpr size_t kRowBlock = 32;

template <size_t R, size_t C, class W>
[[gnu::always_inline]] inline void accumulate(View<const float> x, const W* w, size_t depth, F32x16 (&sums)[R * C]) {
  for (auto& sum : sums) sum = zero();
  size_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    F32x16 weights[C];
    for (size_t c = 0; c < C; ++c) weights[c] = load(w + c * depth + k);
    for (size_t r = 0; r < R; ++r) {
      const F32x16 row = load(x.row(r) + k);
      for (size_t c = 0; c < C; ++c) sums[r * C + c] = fma(row, weights[c], sums[r * C + c]);
    }
  }
  if (k == depth) return;
  for (size_t c = 0; c < C; ++c) {
    const F32x16 weights = load_partial(w + c * depth + k, depth - k);
    for (size_t r = 0; r < R; ++r) {
      sums[r * C + c] = fma(load_partial(x.row(r) + k, depth - k), weights, sums[r * C + c]);
    }
  }
}

template <size_t R, size_t C, class W>
void tile(const LinearArgs& args, size_t row, size_t column) {
  F32x16 sums[R * C];
  const W* w = static_cast<const W*>(args.weight) + column * args.depth;
  accumulate<R, C, W>({args.x.row(row), args.x.stride}, w, args.depth, sums);
  float totals[R * C];
  size_t i = 0;
  for (; i + 4 <= R * C; i += 4) reduce_add4(sums + i, totals + i);
  for (; i < R * C; ++i) totals[i] = reduce_add(sums[i]);
  for (size_t r = 0; r < R; ++r) {
    float* y = args.y.row(row + r) + column;
    for (size_t c = 0; c < C; ++c) {
      float value = totals[r * C + c];
      if (args.bias) value += args.bias[column + c];
      if (args.residual.data) value += args.residual.row(row + r)[column + c];
      y[c] = value;
    }
  }
}

template <size_t R, class W>
void tile_rows(const LinearArgs& args, size_t row, size_t column_begin, size_t column_end) {
  constexpr size_t kColumns = tile_columns(R);
  size_t column = column_begin;
  for (; column + kColumns <= column_end; column += kColumns) tile<R, kColumns, W>(args, row, column);
  for (; column < column_end; ++column) tile<R, 1, W>(args, row, column);
}

// Columns outside, rows inside: a tile of weights is read from memory once per block of rows.
template <class W>
void block_of_rows(const LinearArgs& args, size_t row_begin, size_t row_end, size_t column_begin, size_t column_end) {
  constexpr size_t kColumns = tile_columns(kMaxTileRows);
  for (size_t column = column_begin; column < column_end; column += kColumns) {
    const size_t end = column + kColumns < column_end ? column + kColumns : column_end;
    size_t row = row_begin;
    for (; row + kMaxTileRows <= row_end; row += kMaxTileRows) tile_rows<kMaxTileRows, W>(args, row, column, end);
    if constexpr (kMaxTileRows > 3) {
      if (row_end - row == 3) tile_rows<3, W>(args, row, column, end);
    }
    if constexpr (kMaxTileRows > 2) {
      if (row_end - row == 2) tile_rows<2, W>(args, row, column, end);
    }
    if (row_end - row == 1) tile_rows<1, W>(args, row, column, end);
  }
}

template <class W>
void linear_of(const LinearArgs& args, size_t column_begin, size_t column_end) {
  if (args.num_rows == 1) return tile_rows<1, W>(args, 0, column_begin, column_end);
  for (size_t row = 0; row < args.num_rows; row += kRowBlock) {
    const size_t end = row + kRowBlock < args.num_rows ? row + kRowBlock : args.num_rows;
    block_of_rows<W>(args, row, end, column_begin, column_end);
  }
}

}  // namespace

void linear(const LinearArgs& args, size_t column_begin, size_t column_end) {
  switch (args.weight_type) {
    case DType::kF32:
      return linear_of<float>(args, column_begin, column_end);
    case DType::kF16:
      return linear_of<Half>(args, column_begin, column_end);
    default:
      return linear_of<BFloat16>(args, column_begin, column_end);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
