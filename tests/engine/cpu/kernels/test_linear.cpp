// Linear layers of every number format and tactic, against plain loops in double precision or integers.
#include <cstring>

#include "test_support.h"

namespace llmserve {
namespace {

void test_linear_case(const KernelTable& k, Random& random, size_t depth, size_t rows, size_t columns, DType type) {
  const auto rest = random.numbers(rows * columns);
  Guarded<float> x(random.numbers(rows * depth)), bias(random.numbers(columns));
  const Typed w(random, columns * depth, type);
  const Guarded<std::byte> weight(packed(w.bytes.data(), columns, depth, type));
  const size_t panels = (columns + kPanelColumns - 1) / kPanelColumns;
  std::vector<float> first;
  for (size_t tactic = 0; tactic < k.float_tactics.size(); ++tactic) {
    Guarded<float> y(rest);
    const LinearArgs args = {{x.data(), depth}, rows, depth, columns, weight.data(), type, bias.data(),
                             {y.data(), columns}, {y.data(), columns}};
    k.linear(args, tactic, 0, panels / 2);
    k.linear(args, tactic, panels / 2, panels);
    bool equal = true;
    for (size_t r = 0; r < rows; ++r) {
      for (size_t c = 0; c < columns; ++c) {
        double sum = bias[c] + double{rest[r * columns + c]};
        for (size_t i = 0; i < depth; ++i) sum += double{x[r * depth + i]} * w.values[c * depth + i];
        equal = equal && near(y[r * columns + c], sum);
      }
    }
    expect(equal, k.name, "linear", depth);
    if (first.empty()) first.assign(y.data(), y.data() + rest.size());
    expect(std::memcmp(first.data(), y.data(), rest.size() * sizeof(float)) == 0, k.name, "tactics of linear", tactic);
  }
}

void test_linear(const KernelTable& k, Random& random) {
  for (size_t depth : kSizes) {
    for (size_t rows : {1, 2, 3, 4, 5, 7, 13, 35}) {
      for (DType type : kTypes) test_linear_case(k, random, depth, rows, 1 + random.bits() % 300, type);
    }
  }
  for (DType type : kTypes) {  // several stretches of the depth, several blocks of rows
    test_linear_case(k, random, 450, 29, 70, type);
    test_linear_case(k, random, 200, 210, 33, type);
  }
}

void test_linear_int8_case(const KernelTable& k, Random& random, size_t depth, size_t rows, size_t columns) {
  Guarded<float> x(random.numbers(rows * depth)), scale(random.numbers(columns));
  const size_t stride = (depth + 3) / 4 * 4, panels = (columns + kPanelColumns - 1) / kPanelColumns;
  Guarded<uint8_t> quantized(rows * stride);
  Guarded<float> x_scale(rows);
  k.quantize({x.data(), depth}, depth, rows, {quantized.data(), stride}, {x_scale.data(), 1});
  std::vector<int8_t> w(columns * depth);
  std::vector<int32_t> row_sum(columns);
  for (size_t i = 0; i < w.size(); ++i) row_sum[i / depth] += w[i] = static_cast<int8_t>(int(random.bits() % 255) - 127);
  const Guarded<std::byte> weight(packed(reinterpret_cast<const std::byte*>(w.data()), columns, depth, DType::kI8));
  const Guarded<int32_t> row_sums(row_sum);
  for (size_t tactic = 0; tactic < k.int8_tactics.size(); ++tactic) {
    Guarded<float> y(rows * columns);
    k.linear_int8({{quantized.data(), stride}, {x_scale.data(), 1}, rows, depth, columns,
                   reinterpret_cast<const int8_t*>(weight.data()), scale.data(), row_sums.data(), nullptr, {},
                   {y.data(), columns}}, tactic, 0, panels);
    bool equal = true;
    for (size_t r = 0; r < rows; ++r) {
      for (size_t i = 0; i < depth; ++i) {
        const float restored = static_cast<float>(quantized[r * stride + i] - 128) * x_scale[r];
        equal = equal && std::fabs(restored - x[r * depth + i]) <= x_scale[r] * 0.5001f;
      }
      for (size_t c = 0; c < columns; ++c) {
        int32_t dot = 0;
        for (size_t i = 0; i < depth; ++i) dot += (quantized[r * stride + i] - 128) * w[c * depth + i];
        equal = equal && y[r * columns + c] == static_cast<float>(dot) * (x_scale[r] * scale[c]);
      }
    }
    expect(equal, k.name, "linear_int8", depth);
  }
}

void test_linear_int8(const KernelTable& k, Random& random) {
  for (size_t depth : kSizes) {
    for (size_t rows : {1, 3, 4, 9, 26}) test_linear_int8_case(k, random, depth, rows, 1 + random.bits() % 200);
  }
  test_linear_int8_case(k, random, 1700, 30, 70);
}

// Weights of four bits in groups of eight inputs, against integers written out.
void test_linear_int4_case(const KernelTable& k, Random& random, size_t depth, size_t rows, size_t columns) {
  constexpr size_t kGroup = 8;
  const size_t stride = (depth + 3) / 4 * 4, panels = (columns + kPanelColumns - 1) / kPanelColumns;
  const size_t groups = (depth + kGroup - 1) / kGroup;
  Guarded<float> x(random.numbers(rows * depth)), bias(random.numbers(columns)), x_scale(rows);
  Guarded<int8_t> quantized(rows * stride);
  Guarded<int32_t> sums(rows * groups);
  k.quantize_int4({x.data(), depth}, depth, kGroup, rows, {quantized.data(), stride}, {x_scale.data(), 1},
                  {sums.data(), groups});
  const Typed scale(random, panels * groups * kPanelColumns, DType::kF16);
  std::vector<int> w(columns * depth);
  for (int& value : w) value = static_cast<int>(random.bits() % 16) - 8;
  const Guarded<uint8_t> weight(packed_nibbles(w, columns, depth));
  const Guarded<std::byte> scales(scale.bytes);
  std::vector<float> first;
  for (size_t tactic = 0; tactic < k.int4_tactics.size(); ++tactic) {
    Guarded<float> y(rows * columns);
    k.linear_int4({{quantized.data(), stride}, {x_scale.data(), 1}, {sums.data(), groups}, rows, depth, kGroup, columns,
                   weight.data(), scales.data(), bias.data(), {}, {y.data(), columns}}, tactic, 0, panels);
    bool equal = true;
    for (size_t i = 0; i < rows * columns; ++i) {
      const size_t r = i / columns, c = i % columns;
      double sum = 0.0;
      for (size_t g = 0; g < groups; ++g) {
        int dot = 0;
        for (size_t d = g * kGroup; d < depth && d < (g + 1) * kGroup; ++d) dot += quantized[r * stride + d] * w[c * depth + d];
        sum += dot * double{scale.values[(c / kPanelColumns * groups + g) * kPanelColumns + c % kPanelColumns]};
      }
      equal = equal && near(y[i], sum * x_scale[r] + bias[c]);
    }
    expect(equal, k.name, "linear_int4", depth);
    if (first.empty()) first.assign(y.data(), y.data() + rows * columns);
    expect(std::memcmp(first.data(), y.data(), first.size() * sizeof(float)) == 0, k.name, "tactics of linear_int4", tactic);
  }
}

void test_linear_int4(const KernelTable& k, Random& random) {
  for (size_t depth : kSizes) {
    for (size_t rows : {1, 3, 4, 9, 26}) test_linear_int4_case(k, random, depth, rows, 1 + random.bits() % 200);
  }
}

}  // namespace

void test_linear_layers(const KernelTable& kernels, Random& random) {
  test_linear(kernels, random);
  test_linear_int8(kernels, random);
  test_linear_int4(kernels, random);
}

}  // namespace llmserve
