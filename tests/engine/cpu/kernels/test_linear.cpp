// Compares linear layers of every number format and tactic with plain loops in double precision or integers.
#include <algorithm>
#include <cstring>
#include <string>

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

// Whether each integer is the nearest to its number, and scales and offsets are right.
bool rounds_to_nearest(const std::vector<float>& x, size_t depth, const QuantizedRows& q) {
  bool good = true;
  for (size_t r = 0; r < x.size() / depth; ++r) {
    for (size_t g = 0; g < num_quantized_groups(depth); ++g) {
      const float scale = q.scales.row(r)[g];
      int32_t sum = 0;
      float largest = 0.0f;
      for (size_t i = g * kQuantizedGroup; i < depth && i < (g + 1) * kQuantizedGroup; ++i) {
        const int32_t value = q.values.row(r)[i];
        sum += value;
        largest = std::max(largest, std::fabs(x[r * depth + i]));
        good = good && std::fabs(static_cast<float>(value) * scale - x[r * depth + i]) <= scale * 0.5001f;
      }
      good = good && scale == largest / 127.0f && q.offsets.row(r)[g] == -kZeroPoint * sum;
    }
  }
  return good;
}

// Data of groups of inputs, as bytes and as numbers: a scale and a zero point for each output of a panel.
struct Groups {
  std::vector<std::byte> bytes;  // as in the file
  std::vector<float> scales, zeros;
};

Groups scales_of_bytes(Random& random, size_t count) {
  Typed scales(random, count, DType::kF16);
  return {scales.bytes, scales.values, std::vector<float>(count)};
}

Groups codes_of_nibbles(Random& random, size_t count) {
  Groups groups = {std::vector<std::byte>(2 * count), std::vector<float>(count), std::vector<float>(count)};
  for (size_t i = 0; i < count; ++i) {
    const uint32_t root = random.bits() % 256, zero = random.bits() % 241;
    const size_t place = i / kPanelColumns * 2 * kPanelColumns + i % kPanelColumns;
    groups.bytes[place] = static_cast<std::byte>(root);
    groups.bytes[place + kPanelColumns] = static_cast<std::byte>(zero);
    groups.scales[i] = static_cast<float>(root * root);
    groups.zeros[i] = static_cast<float>(zero) / 16.0f;
  }
  return groups;
}

// Compares linear layers with 8-bit or 4-bit weights with plain loops over integers.
void test_grouped_case(const KernelTable& k, Random& random, size_t depth, size_t rows, size_t columns, bool bytes) {
  const size_t stride = (depth + 3) / 4 * 4, panels = (columns + kPanelColumns - 1) / kPanelColumns;
  const size_t groups = num_quantized_groups(depth);
  std::vector<float> x = random.numbers(rows * depth);
  for (size_t i = 0; i < std::min(depth, kQuantizedGroup); ++i) x[i] = 0.0f;
  std::fill(x.end() - static_cast<ptrdiff_t>(depth), x.end(), 1.0f);  // a row whose integers are all the largest
  Guarded<float> input(x), bias(random.numbers(columns)), x_scales(rows * groups), column_scale(random.numbers(columns));
  Guarded<int8_t> values(rows * stride);
  Guarded<int32_t> offsets(rows * groups);
  const QuantizedRows q = {{values.data(), stride}, {x_scales.data(), groups}, {offsets.data(), groups}};
  k.quantize({input.data(), depth}, depth, rows, q);
  expect(rounds_to_nearest(x, depth, q), k.name, "quantize", depth);
  const size_t num_scales = panels * groups * kPanelColumns;
  const Groups of_groups = bytes ? scales_of_bytes(random, num_scales) : codes_of_nibbles(random, num_scales);
  std::vector<int> w(columns * depth);
  for (int& value : w) value = bytes ? static_cast<int>(random.bits() % 256) - 128 : static_cast<int>(random.bits() % 16);
  std::fill_n(w.begin(), depth, bytes ? -128 : 15);
  const Guarded<uint8_t> weight(bytes ? packed_bytes(w, columns, depth) : packed_nibbles(w, columns, depth));
  const Guarded<std::byte> group_bytes(of_groups.bytes);
  const auto kernel = bytes ? k.linear_int8 : k.linear_int4;
  const std::string name = bytes ? "linear_int8" : "linear_int4";
  std::vector<float> first;
  for (size_t tactic = 0; tactic < (bytes ? k.int8_tactics : k.int4_tactics).size(); ++tactic) {
    Guarded<float> y(rows * columns);
    kernel({q, rows, depth, columns, weight.data(), group_bytes.data(), column_scale.data(), bias.data(), {},
            {y.data(), columns}}, tactic, 0, panels);
    bool equal = true;
    for (size_t i = 0; i < rows * columns; ++i) {
      const size_t r = i / columns, c = i % columns;
      double sum = 0.0, size = 0.0;
      for (size_t g = 0; g < groups; ++g) {
        const size_t place = (c / kPanelColumns * groups + g) * kPanelColumns + c % kPanelColumns;
        double dot = 0.0;
        for (size_t d = g * kQuantizedGroup; d < depth && d < (g + 1) * kQuantizedGroup; ++d) {
          dot += values[r * stride + d] * (w[c * depth + d] - double{of_groups.zeros[place]});
        }
        const double term = dot * double{x_scales[r * groups + g]} * double{of_groups.scales[place] * column_scale[c]};
        sum += term;
        size += std::fabs(term);
      }
      equal = equal && std::fabs(y[i] - (sum + bias[c])) <= 1e-6 * (size + std::fabs(double{bias[c]}));
    }
    expect(equal, k.name, name.c_str(), depth);
    if (first.empty()) first.assign(y.data(), y.data() + rows * columns);
    const bool same = std::memcmp(first.data(), y.data(), first.size() * sizeof(float)) == 0;
    expect(same, k.name, ("tactics of " + name).c_str(), tactic);
  }
}

void test_grouped(const KernelTable& k, Random& random) {
  for (const bool bytes : {true, false}) {
    for (size_t depth : kSizes) {
      for (size_t rows : {1, 3, 4, 9, 26}) test_grouped_case(k, random, depth, rows, 1 + random.bits() % 200, bytes);
    }
    test_grouped_case(k, random, 1700, 30, 70, bytes);
    test_grouped_case(k, random, 1344, 37, 290, bytes);  // stretches, panels and rows, the last of which are smaller
    test_grouped_case(k, random, 64, 275, 40, bytes);    // blocks of rows
  }
}

// Random bytes; the halves at the beginning of each block have an ordinary size.
std::vector<std::byte> random_blocks(Random& random, Blocks blocks, size_t count) {
  std::vector<std::byte> bytes(count * block_bytes(blocks));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.bits());
  if (blocks == Blocks::kExponent) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(120 + random.bits() % 12);
    return bytes;
  }
  const bool has_minimum = blocks == Blocks::kScaleAndMinimum || blocks == Blocks::kScales ||
                           blocks == Blocks::kHalfScalesAndMinima;
  const size_t num_halves = (has_minimum ? 2 : 1) * kPanelColumns;
  for (size_t i = 0; i < count; ++i) {
    const Typed halves(random, num_halves, DType::kF16);
    std::memcpy(bytes.data() + i * block_bytes(blocks), halves.bytes.data(), halves.bytes.size());
  }
  return bytes;
}

// Compares linear_blocks with plain products of the rows that `embed` looks up in the same blocks.
void test_blocks_case(const KernelTable& k, Random& random, DType type, Blocks blocks, size_t rows, size_t columns) {
  const size_t depth = 512, groups = num_quantized_groups(depth), panels = (columns + kPanelColumns - 1) / kPanelColumns;
  std::vector<uint8_t> codes(panels * kPanelColumns * depth * code_bits(type) / 8);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random.bits());
  std::fill_n(codes.begin(), kPanelColumns * depth * code_bits(type) / 8, uint8_t{255});  // the largest
  const Guarded<uint8_t> weight(codes);
  const Guarded<std::byte> items(random_blocks(random, blocks, panels * (depth / block_inputs(blocks))));
  std::vector<float> x = random.numbers(rows * depth);
  std::fill(x.end() - static_cast<ptrdiff_t>(depth), x.end(), -1.0f);
  Guarded<float> input(x), column_scale(random.numbers(columns)), x_scales(rows * groups);
  Guarded<int8_t> values(rows * depth);
  Guarded<int32_t> offsets(rows * groups), halves(rows * groups);
  const QuantizedRows q = {{values.data(), depth}, {x_scales.data(), groups}, {offsets.data(), groups},
                           {halves.data(), groups}};
  k.quantize({input.data(), depth}, depth, rows, q);
  std::vector<int32_t> ids(columns);
  for (size_t i = 0; i < columns; ++i) ids[i] = static_cast<int32_t>(i);
  std::vector<float> w(columns * depth), first;
  k.embed({weight.data(), type, Layout::kPanels, depth, items.data(), column_scale.data(), blocks}, ids.data(), columns,
          {w.data(), depth});
  for (size_t tactic = 0; tactic < k.int4_tactics.size(); ++tactic) {
    Guarded<float> y(rows * columns);
    k.linear_blocks({q, rows, depth, columns, weight.data(), items.data(), column_scale.data(), nullptr, {},
                     {y.data(), columns}, code_bits(type), blocks}, tactic, 0, panels);
    bool equal = true;
    for (size_t i = 0; i < rows * columns; ++i) {
      const size_t r = i / columns, c = i % columns;
      double sum = 0.0, size = 0.0;
      for (size_t d = 0; d < depth; ++d) {
        const double term = values[r * depth + d] * double{x_scales[r * groups + d / 32]} * double{w[c * depth + d]};
        sum += term;
        size += std::fabs(term);
      }
      equal = equal && std::fabs(y[i] - sum) <= 3e-6 * size;
    }
    expect(equal, k.name, "linear_blocks", code_bits(type));
    if (first.empty()) first.assign(y.data(), y.data() + rows * columns);
    const bool same = std::memcmp(first.data(), y.data(), first.size() * sizeof(float)) == 0;
    expect(same, k.name, "tactics of linear_blocks", tactic);
  }
}

void test_blocks(const KernelTable& k, Random& random) {
  for (size_t rows : {1, 3, 4, 9, 26}) {
    for (DType type : {DType::kI2, DType::kI3, DType::kI4, DType::kI5, DType::kI6}) {
      for (uint32_t blocks = 0; blocks < kNumBlocks; ++blocks) {
        const auto kind = static_cast<Blocks>(blocks);
        if (are_codes_of(kind, type)) test_blocks_case(k, random, type, kind, rows, 1 + random.bits() % 200);
      }
    }
  }
}

}  // namespace

void test_linear_layers(const KernelTable& kernels, Random& random) {
  test_linear(kernels, random);
  test_grouped(kernels, random);
  test_blocks(kernels, random);
}

}  // namespace llmserve
