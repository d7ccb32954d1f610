// Kernels that mix the parallel streams of a row, or that depend on the mean and size of a row.
#include "rows.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// Reduces a row: sums = fn(sums, lanes, count) for each vector; returns the sum of all lanes.
template <class Fn>
float sum_of(const float* x, size_t width, Fn fn) {
  F32x16 sums = zero();
  const auto add = [&](size_t i, size_t n) { sums = fn(sums, load_lanes(x + i, n), n); };
  for_lanes(width, [&](size_t i) { add(i, kLanes); }, add);
  return reduce_add(sums);
}

float mean_square(const float* x, size_t width) {
  return sum_of(x, width, [](F32x16 sums, F32x16 x, size_t) { return fma(x, x, sums); }) / static_cast<float>(width);
}

}  // namespace

void mix(const MixArgs& args, size_t num_rows) {
  const size_t width = args.width;
  for (size_t r = 0; r < num_rows; ++r) {
    const float* coefficients = args.coefficients.data ? args.coefficients.row(r) : nullptr;
    for (size_t k = 0; k < args.groups; ++k) {
      const float* x = args.x.row(r) + k * width;
      float* y = args.y.row(r) + k * width;
      const auto mixed = [&](size_t i, size_t n) {
        F32x16 sum = load_lanes(x + i, n);
        for (size_t j = 0; k >= args.first && j < args.num_others; ++j) {
          const float factor = (coefficients ? coefficients[k * args.num_others + j] : 0.0f) + args.offset;
          sum = fma(broadcast(factor), load_lanes(args.z.row(r) + j * width + i, n), sum);
        }
        store_lanes(y + i, sum, n);
      };
      for_lanes(width, [&](size_t i) { mixed(i, kLanes); }, mixed);
    }
  }
}

void spread(View<const float> x, size_t width, View<const float> z, size_t others, float least, size_t num_rows,
            View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const float size = __builtin_sqrtf(mean_square(x.row(r), width));
    __builtin_memcpy(y.row(r), x.row(r), width * sizeof(float));
    for (size_t j = 0; j < others; ++j) {
      const float* source = z.row(r) + j * width;
      float* target = y.row(r) + (j + 1) * width;
      const float square = mean_square(source, width);
      const F32x16 factor = broadcast(size / __builtin_sqrtf(square > least ? square : least));
      const auto scaled = [&](size_t i, size_t n) { store_lanes(target + i, load_lanes(source + i, n) * factor, n); };
      for_lanes(width, [&](size_t i) { scaled(i, kLanes); }, scaled);
    }
  }
}

void over_threshold(View<const float> x, float deviations, size_t width, size_t num_rows, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const float* row = x.row(r);
    const auto count = static_cast<float>(width);
    const float mean = sum_of(row, width, [](F32x16 sums, F32x16 x, size_t) { return sums + x; }) / count;
    const float squares = sum_of(row, width, [&](F32x16 sums, F32x16 x, size_t n) {
      float lanes[kLanes] = {};
      store_lanes(lanes, x - broadcast(mean), n);  // zero past the end of the row
      const F32x16 centered = load(lanes);
      return fma(centered, centered, sums);
    });
    const F32x16 threshold = broadcast(mean + deviations * __builtin_sqrtf(squares / count));
    const auto cut = [&](size_t i, size_t n) {
      store_lanes(y.row(r) + i, max(load_lanes(row + i, n) - threshold, zero()), n);
    };
    for_lanes(width, [&](size_t i) { cut(i, kLanes); }, cut);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
