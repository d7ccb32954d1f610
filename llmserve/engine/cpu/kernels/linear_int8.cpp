// y = x @ weight.T for int8 weights and activations: exact integer sums, then one scale per row and column.
#include "simd.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

constexpr size_t kRowBlock = 64;

template <size_t R, size_t C>
[[gnu::always_inline]] inline void accumulate(View<const uint8_t> x, const int8_t* w, size_t depth,
                                              int32_t (&totals)[R * C]) {
  DotU8S8 dots[R * C];
  size_t k = 0;
  for (; k + DotU8S8::kStep <= depth; k += DotU8S8::kStep) {
    for (size_t r = 0; r < R; ++r) {
      for (size_t c = 0; c < C; ++c) dots[r * C + c].add(x.row(r) + k, w + c * depth + k);
    }
  }
  for (size_t i = 0; i < R * C; ++i) totals[i] = dots[i].total();
  for (; k < depth; ++k) {
    for (size_t r = 0; r < R; ++r) {
      for (size_t c = 0; c < C; ++c) totals[r * C + c] += int32_t{x.row(r)[k]} * int32_t{w[c * depth + k]};
    }
  }
}

template <size_t R, size_t C>
void tile(const LinearInt8Args& args, size_t row, size_t column) {
  int32_t totals[R * C];
  accumulate<R, C>({args.x.row(row), args.x.stride}, args.weight + column * args.depth, args.depth, totals);
  for (size_t r = 0; r < R; ++r) {
    const float x_scale = *args.x_scale.row(row + r);
    for (size_t c = 0; c < C; ++c) {
      const size_t n = column + c;
      const auto zero_point = 128u * static_cast<uint32_t>(args.weight_row_sum[n]);
      const auto dot = static_cast<int32_t>(static_cast<uint32_t>(totals[r * C + c]) - zero_point);
      float value = static_cast<float>(dot) * (x_scale * args.weight_scale[n]);
      if (args.bias) value += args.bias[n];
      if (args.residual.data) value += args.residual.row(row + r)[n];
      args.y.row(row + r)[n] = value;
    }
  }
}

template <size_t R>
void tile_rows(const LinearInt8Args& args, size_t row, size_t column_begin, size_t column_end) {
  constexpr size_t kColumns = tile_columns(R);
  size_t column = column_begin;
  for (; column + kColumns <= column_end; column += kColumns) tile<R, kColumns>(args, row, column);
  for (; column < column_end; ++column) tile<R, 1>(args, row, column);
}

void block_of_rows(const LinearInt8Args& args, size_t row_begin, size_t row_end, size_t column_begin,
                   size_t column_end) {
  constexpr size_t kColumns = tile_columns(kMaxTileRows);
  for (size_t column = column_begin; column < column_end; column += kColumns) {
    const size_t end = column + kColumns < column_end ? column + kColumns : column_end;
    size_t row = row_begin;
    for (; row + kMaxTileRows <= row_end; row += kMaxTileRows) tile_rows<kMaxTileRows>(args, row, column, end);
    for (; row < row_end; ++row) tile_rows<1>(args, row, column, end);
  }
}

}  // namespace

void linear_int8(const LinearInt8Args& args, size_t column_begin, size_t column_end) {
  if (args.num_rows == 1) return tile_rows<1>(args, 0, column_begin, column_end);
  for (size_t row = 0; row < args.num_rows; row += kRowBlock) {
    const size_t end = row + kRowBlock < args.num_rows ? row + kRowBlock : args.num_rows;
    block_of_rows(args, row, end, column_begin, column_end);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
