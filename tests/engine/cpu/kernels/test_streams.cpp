// Compares the kernels that mix, spread and cut streams with plain loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "test_support.h"

namespace llmserve {

void test_streams(const KernelTable& k, Random& random) {
  const size_t rows = 3;
  for (const size_t width : {1u, 7u, 16u, 33u, 64u}) {
    const auto x = random.numbers(rows * width);
    std::vector<float> y(rows * width);
    bool equal = true;
    const auto streams = random.numbers(rows * 2 * width), coefficients = random.numbers(2 * rows);
    std::vector<float> mixed(2 * width * rows);
    const MixArgs mix = {{streams.data(), 2 * width}, {x.data(), width}, {coefficients.data(), 2}, 2, 1, width, 0, 0.25f,
                         {mixed.data(), 2 * width}};
    k.mix(mix, rows);
    for (size_t i = 0; i < mixed.size(); ++i) {
      const size_t row = i / (2 * width), group = i / width % 2;
      equal = equal && near(mixed[i], streams[i] + (coefficients[2 * row + group] + 0.25) * x[row * width + i % width]);
    }
    expect(equal, k.name, "mix", width);
    std::vector<float> spread(3 * width * rows);
    k.spread({x.data(), width}, width, {streams.data(), 2 * width}, 2, 0.1f, rows, {spread.data(), 3 * width});
    const auto mean_square = [&](const float* values) {
      double sum = 0;
      for (size_t i = 0; i < width; ++i) sum += double{values[i]} * values[i];
      return sum / static_cast<double>(width);
    };
    for (size_t row = 0; row < rows; ++row) {
      const float* first = &x[row * width];
      for (size_t i = 0; i < 3 * width; ++i) {
        const float* group = i < width ? first : &streams[row * 2 * width + (i / width - 1) * width];
        const double size = i < width ? 1.0 : std::sqrt(mean_square(first) / std::max(mean_square(group), 0.1));
        equal = equal && near(spread[row * 3 * width + i], group[i % width] * size);
      }
    }
    expect(equal, k.name, "spread", width);
    k.over_threshold({x.data(), width}, 0.3f, width, rows, {y.data(), width});
    for (size_t row = 0; row < rows; ++row) {
      double mean = 0, squares = 0;
      for (size_t i = 0; i < width; ++i) mean += x[row * width + i] / static_cast<double>(width);
      for (size_t i = 0; i < width; ++i) squares += std::pow(x[row * width + i] - mean, 2) / static_cast<double>(width);
      for (size_t i = 0; i < width; ++i) {
        const double passed = std::max(0.0, x[row * width + i] - mean - 0.3 * std::sqrt(squares));
        equal = equal && std::abs(y[row * width + i] - passed) < 1e-5;
      }
    }
    expect(equal, k.name, "over_threshold", width);
  }
}

}  // namespace llmserve
