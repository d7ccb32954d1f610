// Compares ops with a state with plain loops: rows in one run and in two, the state in place and copied.
#include "test_support.h"

namespace llmserve {
namespace {

constexpr size_t kTokens = 5, kFirst = 2;  // of these tokens, kFirst are in the first of two runs

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

void test_convolution(const KernelTable& k, Random& random, size_t width) {
  for (const size_t taps : {2, 4, 9}) {
    const auto x = random.numbers(kTokens * width), weight = random.numbers(width * taps), bias = random.numbers(width);
    std::vector<float> y(kTokens * width), states((taps - 1) * width), others(states.size());
    for (const bool silu : {false, true}) {
      const float* added = silu ? nullptr : bias.data();
      const auto run = [&](size_t first, size_t count, const float* before, float* after) {
        const ConvolutionArgs args = {{x.data() + first * width, width}, count, width, weight.data(), added, taps, silu,
                                      before, after, {y.data() + first * width, width}};
        const size_t half = width / 2 / 16 * 16;
        k.convolution(args, half, width);
        k.convolution(args, 0, half);
      };
      for (const bool in_place : {true, false}) {
        run(0, kFirst, nullptr, states.data());
        run(kFirst, kTokens - kFirst, states.data(), in_place ? states.data() : others.data());
        bool equal = true;
        for (size_t r = 0; r < kTokens; ++r) {
          for (size_t c = 0; c < width; ++c) {
            double sum = added ? added[c] : 0.0f;
            for (size_t tap = 0; tap < taps; ++tap) {
              if (r + tap + 1 >= taps) sum += double{weight[c * taps + tap]} * x[(r + tap + 1 - taps) * width + c];
            }
            equal = equal && near(y[r * width + c], silu ? sum * sigmoid(sum) : sum);
          }
        }
        const float* last = (in_place ? states : others).data() + (taps - 2) * width;
        equal = equal && std::memcmp(last, x.data() + (kTokens - 1) * width, width * sizeof(float)) == 0;
        expect(equal, k.name, "convolution", width);
      }
    }
  }
}

// Two heads that share a key head.
void test_delta_rule(const KernelTable& k, Random& random, size_t key_dim, size_t value_dim) {
  const size_t heads = 2, width = 2 * key_dim + heads * value_dim, out = heads * value_dim;
  const auto x = random.numbers(kTokens * width), gates = random.numbers(kTokens * 2 * heads);
  const auto decay = random.numbers(heads), bias = random.numbers(heads);
  std::vector<float> y(kTokens * out), states(out * key_dim), others(states.size());
  const auto run = [&](size_t first, size_t count, const float* before, float* after) {
    const DeltaRuleArgs args = {{x.data() + first * width, width}, {gates.data() + first * 2 * heads, 2 * heads}, count,
                                heads, 1, key_dim, value_dim, decay.data(), bias.data(), before, after,
                                {y.data() + first * out, out}};
    for (size_t head = 0; head < heads; ++head) {
      for (size_t begin = 0; begin < value_dim; begin += kStateColumns) {
        k.delta_rule(args, head, begin, begin + kStateColumns < value_dim ? begin + kStateColumns : value_dim);
      }
    }
  };
  for (const bool in_place : {true, false}) {
    run(0, kFirst, nullptr, states.data());
    run(kFirst, kTokens - kFirst, states.data(), in_place ? states.data() : others.data());
    bool equal = true;
    for (size_t head = 0; head < heads; ++head) {
      std::vector<double> state(key_dim * value_dim), key(key_dim), query(key_dim);
      for (size_t r = 0; r < kTokens; ++r) {
        const float *row = x.data() + r * width, *value = row + 2 * key_dim + head * value_dim;
        double of_query = 1e-6, of_key = 1e-6;
        for (size_t i = 0; i < key_dim; ++i) {
          of_query += double{row[i]} * row[i];
          of_key += double{row[key_dim + i]} * row[key_dim + i];
        }
        for (size_t i = 0; i < key_dim; ++i) {
          query[i] = row[i] / std::sqrt(of_query * static_cast<double>(key_dim));
          key[i] = row[key_dim + i] / std::sqrt(of_key);
        }
        const float* gate = gates.data() + r * 2 * heads;
        const double kept = std::exp(-std::exp(double{decay[head]}) * std::log1p(std::exp(double{gate[heads + head]} + bias[head])));
        for (size_t v = 0; v < value_dim; ++v) {
          double found = 0.0, sum = 0.0;
          for (size_t i = 0; i < key_dim; ++i) found += key[i] * (state[i * value_dim + v] *= kept);
          for (size_t i = 0; i < key_dim; ++i) {
            sum += query[i] * (state[i * value_dim + v] += key[i] * (value[v] - found) * sigmoid(gate[head]));
          }
          equal = equal && near(y[r * out + head * value_dim + v], sum);
        }
      }
      const float* last = (in_place ? states : others).data() + head * key_dim * value_dim;
      for (size_t i = 0; i < state.size(); ++i) {  // in panels
        const size_t row = i / value_dim, begin = i % value_dim / kStateColumns * kStateColumns;
        const size_t columns = begin + kStateColumns < value_dim ? kStateColumns : value_dim - begin;
        equal = equal && near(last[begin * key_dim + row * columns + i % value_dim - begin], state[i]);
      }
    }
    expect(equal, k.name, "delta_rule", value_dim);
  }
}

// Two heads that share b and c.
void test_selective_scan(const KernelTable& k, Random& random, size_t size, size_t head_dim) {
  const size_t heads = 2, out = heads * head_dim, width = out + 2 * size;
  const auto x = random.numbers(kTokens * width), steps = random.numbers(kTokens * heads);
  const auto decay = random.numbers(heads), bias = random.numbers(heads), skip = random.numbers(heads);
  std::vector<float> y(kTokens * out), states(out * size), others(states.size());
  const auto run = [&](size_t first, size_t count, const float* before, float* after) {
    const SelectiveScanArgs args = {{x.data() + first * width, width}, {steps.data() + first * heads, heads}, count, heads,
                                    1, size, head_dim, decay.data(), bias.data(), skip.data(), before, after,
                                    {y.data() + first * out, out}};
    for (size_t head = 0; head < heads; ++head) {
      for (size_t begin = 0; begin < head_dim; begin += kStateColumns) {
        k.selective_scan(args, head, begin, begin + kStateColumns < head_dim ? begin + kStateColumns : head_dim);
      }
    }
  };
  for (const bool in_place : {true, false}) {
    run(0, kFirst, nullptr, states.data());
    run(kFirst, kTokens - kFirst, states.data(), in_place ? states.data() : others.data());
    bool equal = true;
    for (size_t head = 0; head < heads; ++head) {
      std::vector<double> state(size * head_dim);
      for (size_t r = 0; r < kTokens; ++r) {
        const float *row = x.data() + r * width, *value = row + head * head_dim, *b = row + out, *c = b + size;
        const double step = std::log1p(std::exp(double{steps[r * heads + head]} + bias[head]));
        const double kept = std::exp(-std::exp(double{decay[head]}) * step);
        for (size_t v = 0; v < head_dim; ++v) {
          double sum = double{skip[head]} * value[v];
          for (size_t i = 0; i < size; ++i) {
            double& place = state[i * head_dim + v];
            sum += c[i] * (place = place * kept + b[i] * step * value[v]);
          }
          equal = equal && near(y[r * out + head * head_dim + v], sum);
        }
      }
      const float* last = (in_place ? states : others).data() + head * size * head_dim;
      for (size_t i = 0; i < state.size(); ++i) {  // in panels
        const size_t row = i / head_dim, begin = i % head_dim / kStateColumns * kStateColumns;
        const size_t columns = begin + kStateColumns < head_dim ? kStateColumns : head_dim - begin;
        equal = equal && near(last[begin * size + row * columns + i % head_dim - begin], state[i]);
      }
    }
    expect(equal, k.name, "selective_scan", head_dim);
  }
}

}  // namespace

void test_states(const KernelTable& k, Random& random) {
  for (size_t width : kSizes) test_convolution(k, random, width);
  for (size_t value_dim : {1, 15, 16, 33, 64, 81, 130}) {
    test_delta_rule(k, random, value_dim % 7 + 5, value_dim);
    test_selective_scan(k, random, value_dim % 7 + 5, value_dim);
  }
}

}  // namespace llmserve
