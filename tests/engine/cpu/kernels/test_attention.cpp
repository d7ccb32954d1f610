// Compares attention over each type of cache with a plain loop over the same numbers.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "test_support.h"

namespace llmserve {
namespace {

struct AttentionCase {
  size_t head_dim, group, block_size, start, rows, window;
  bool alibi, rope;
  size_t rotary_dim = head_dim;
  float soft_cap = 0.0f;
  bool in_chunks = false;
  bool whole = false;  // every query sees all positions
};

// Returns x with the first part of each head rotated by the row's angles.
std::vector<float> turned(const std::vector<float>& x, const std::vector<float>& table, const AttentionCase& c,
                          size_t width) {
  std::vector<float> y(x);
  const size_t half = c.rotary_dim / 2;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t d = i % c.head_dim;
    if (d >= c.rotary_dim) continue;
    const float* cos = &table[i / width * c.rotary_dim];
    const float* sin = cos + half;
    y[i] = d < half ? x[i] * cos[d] - x[i + half] * sin[d] : x[i] * cos[d - half] + x[i - half] * sin[d - half];
  }
  return y;
}

// Rounds each group of `group` numbers of a head to multiples of its scale, with a maximum of 127; returns the scales.
std::vector<float> round_groups(std::vector<float>& x, size_t head_dim, size_t group) {
  std::vector<float> scales;
  for (size_t head = 0; head < x.size(); head += head_dim) {
    for (size_t begin = head; begin < head + head_dim; begin += group) {
      const size_t end = std::min(begin + group, head + head_dim);
      float peak = 0.0f;
      for (size_t i = begin; i < end; ++i) peak = std::max(peak, std::fabs(x[i]));
      const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
      for (size_t i = begin; i < end; ++i) x[i] = std::nearbyint(x[i] * inverse) * (peak / 127.0f);
      scales.push_back(peak / 127.0f);
    }
  }
  return scales;
}

// Rounds a query's weights as the integer kernel does: weight times value scale, in 16383 steps per kChunkPositions
// positions. `scales`: those of the values, per position; `first`: the first position.
void round_shares(std::vector<double>& weights, const std::vector<float>& scales, size_t first) {
  for (size_t begin = 0; begin < weights.size();) {
    const size_t end = std::min(weights.size(), begin + kChunkPositions - (first + begin) % kChunkPositions);
    double peak = 0.0;
    for (size_t i = begin; i < end; ++i) peak = std::max(peak, weights[i] * scales[i]);
    for (size_t i = begin; i < end && peak > 0.0; ++i) {
      if (scales[i] == 0.0f) continue;
      weights[i] = std::nearbyint(weights[i] * scales[i] / peak * 16383.0) * peak / 16383.0 / scales[i];
    }
    begin = end;
  }
}

// Transforms heads as in `mixing.h`, in one plain loop.
void mix(std::vector<float>& rows, size_t head_dim, bool are_queries) {
  for (size_t begin = 0; begin < rows.size();) {
    const size_t count = std::bit_floor(head_dim - begin % head_dim);
    float* x = rows.data() + begin;
    for (size_t half = 1; half < count; half *= 2) {
      for (size_t i = 0; i < count; ++i) {
        if (i & half) continue;
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
    for (size_t i = 0; are_queries && i < count; ++i) x[i] /= static_cast<float>(count);
    begin += count;
  }
}

// Writes a cache with the kernel, attends to it, and compares the result with a plain loop over the same numbers.
void test_attention_case(const KernelTable& k, Random& random, const AttentionCase& c, DType type) {
  constexpr size_t kKvHeads = 2;
  const size_t length = c.start + c.rows, blocks = (length + c.block_size - 1) / c.block_size;
  const size_t heads = kKvHeads * c.group, kv_width = kKvHeads * c.head_dim, width = heads * c.head_dim;
  Typed keys(random, length * kv_width, DType::kF32), values(random, length * kv_width, DType::kF32);
  const auto q = random.numbers(c.rows * width), slopes = random.numbers(heads), sinks = random.numbers(heads);
  const bool has_sinks = c.group % 2 == 0;
  const auto table = random.numbers(length * c.rotary_dim);
  const View<const float> angles = {c.rope ? table.data() : nullptr, c.rotary_dim};
  std::vector<int32_t> block_ids(blocks), slots(length);
  for (size_t b = 0; b < blocks; ++b) block_ids[b] = static_cast<int32_t>(blocks - 1 - b);
  for (size_t p = 0; p < length; ++p) {
    slots[p] = static_cast<int32_t>(static_cast<size_t>(block_ids[p / c.block_size]) * c.block_size + p % c.block_size);
  }
  const CacheShape shape = {type, c.block_size, kKvHeads, c.head_dim};
  Guarded<std::byte> key_plane(blocks * shape.block_bytes()), value_plane(blocks * shape.block_bytes());
  k.cache_write({shape, {keys.values.data(), kv_width}, {values.values.data(), kv_width}, angles, c.rotary_dim,
                 slots.data(), length, key_plane.data(), value_plane.data()});

  std::vector<float> y(c.rows * width);
  const bool integers = type == DType::kI8;
  Guarded<float> scratch(integers ? attention_int8_scratch(c.head_dim) : attention_scratch(length, c.head_dim));
  const float scale = 0.3f;
  const AttentionArgs args = {shape, {q.data(), width}, angles, c.rotary_dim, {y.data(), width}, key_plane.data(),
                              value_plane.data(), block_ids.data(), heads, c.start, c.window, scale, c.soft_cap,
                              c.alibi ? slopes.data() : nullptr, has_sinks ? sinks.data() : nullptr, c.in_chunks,
                              c.whole ? length : 0};
  const auto kernel = integers ? k.attention_int8 : k.attention;
  for (size_t head = 0; head < kKvHeads; ++head) kernel(args, head, 0, c.rows, scratch.data());

  std::vector<float> queries = c.rope ? turned(q, table, c, width) : q, value_scales;
  if (c.rope) {  // also a separate kernel
    std::vector<float> found(q.size());
    k.rope({q.data(), width}, angles, c.rotary_dim, c.head_dim, width, c.rows, {found.data(), width});
    bool same = true;
    for (size_t i = 0; i < found.size(); ++i) same = same && std::fabs(found[i] - queries[i]) <= 1e-5;
    expect(same, k.name, "rope", c.head_dim);
  }
  if (c.rope) keys.values = turned(keys.values, table, c, kv_width);
  if (integers) {
    mix(queries, c.head_dim, true);
    mix(keys.values, c.head_dim, false);
    round_groups(queries, c.head_dim, kQuantizedGroup);
    round_groups(keys.values, c.head_dim, kQuantizedGroup);
    value_scales = round_groups(values.values, c.head_dim, c.head_dim);
  }
  bool equal = true;
  // A difference in the last bit can change a rounded share; and slopes make scores of hundreds, with fewer decimals.
  const double tolerance = integers ? 2e-4 : length > 256 ? 1e-4 : 2e-5;
  for (size_t r = 0; r < c.rows; ++r) {
    const size_t end = c.whole ? length : c.start + r + 1, last = c.window && end > c.window ? end - c.window : 0;
    const size_t first = c.in_chunks ? (end - 1) / c.window * c.window : last;
    for (size_t h = 0; h < heads; ++h) {
      const size_t kv = h / c.group * c.head_dim;
      std::vector<double> wanted(c.head_dim), weights;
      std::vector<float> scales;
      for (size_t p = first; p < end; ++p) {
        double score = 0.0;
        for (size_t d = 0; d < c.head_dim; ++d) {
          score += double{queries[r * width + h * c.head_dim + d]} * keys.values[p * kv_width + kv + d];
        }
        score *= scale;
        if (c.soft_cap > 0.0f) score = c.soft_cap * std::tanh(score / c.soft_cap);
        weights.push_back(std::exp(score - (c.alibi ? slopes[h] : 0.0) * static_cast<double>(end - 1 - p)));
        if (integers) scales.push_back(value_scales[p * kKvHeads + h / c.group]);
      }
      const double sink = has_sinks ? std::exp(double{sinks[h]}) : 0.0;
      const double total = std::accumulate(weights.begin(), weights.end(), sink);
      if (integers) round_shares(weights, scales, first);
      for (size_t p = first; p < end; ++p) {
        for (size_t d = 0; d < c.head_dim; ++d) wanted[d] += weights[p - first] * values.values[p * kv_width + kv + d];
      }
      for (size_t d = 0; d < c.head_dim; ++d) {
        const double found = y[r * width + h * c.head_dim + d], expected = wanted[d] / total;
        equal = equal && std::fabs(found - expected) <= tolerance * (1.0 + std::fabs(expected));
      }
    }
  }
  expect(equal, k.name, "attention", c.head_dim);
}

}  // namespace

void test_attention(const KernelTable& k, Random& random) {
  constexpr AttentionCase kCases[] = {
      {16, 1, 4, 0, 9, 0, false, true},    {20, 3, 5, 7, 6, 0, true, false},    {64, 2, 16, 33, 1, 0, false, true},
      {8, 5, 1, 3, 4, 0, false, false},    {48, 1, 8, 0, 21, 2, false, true},   {33, 4, 3, 10, 5, 6, true, false},
      {2, 1, 7, 0, 1, 0, false, true},     {128, 1, 32, 40, 3, 0, true, false}, {64, 7, 32, 70, 5, 50, false, true},
      {80, 9, 48, 101, 2, 0, false, true}, {40, 1, 96, 3, 90, 37, true, true},
      {48, 2, 16, 20, 7, 0, false, true, 36},  {33, 3, 8, 5, 9, 6, true, true, 2, 0.7f},
      {64, 1, 32, 0, 40, 0, false, true, 64, 1.5f}, {64, 7, 32, 250, 40, 0, false, true},
      {80, 5, 64, 500, 60, 300, false, true},  {33, 2, 12, 511, 9, 0, true, false},
      {48, 3, 16, 5, 40, 7, false, true, 48, 0.0f, true},  {64, 2, 32, 240, 60, 256, false, true, 64, 0.0f, true},
      {33, 4, 8, 500, 30, 500, true, false, 33, 0.7f, true},
      {20, 3, 5, 0, 23, 0, false, false, 20, 0.0f, false, true},
      {64, 1, 32, 0, 300, 0, false, true, 64, 0.7f, false, true},
  };
  for (const AttentionCase& c : kCases) {
    for (DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8}) {
      const bool holds_keys = type == DType::kF32 || type == DType::kI8 || !c.rope;  // exactly, or as the test rounds them
      if (holds_keys) test_attention_case(k, random, c, type);
    }
  }
}

}  // namespace llmserve
