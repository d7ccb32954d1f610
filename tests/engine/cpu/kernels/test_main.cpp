// Runs the kernels of every variant on buffers of exactly the size that they need, and the engine on damaged files,
// under address and undefined-behaviour sanitizers. Usage: kernel_tests SCRATCH_FILE ENGINE_FILE...; 0: success.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "engine.h"
#include "isa.h"
#include "test_support.h"

namespace llmserve {
namespace {

double gelu_tanh(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979) * (x + 0.044715 * x * x * x)));
}

// The error is relative to the value itself: values near zero stay precise.
void test_small_numbers_under_soft_caps(const KernelTable& k) {
  bool equal = true;
  for (float value = 1e-30f; value < 3.0f; value *= 1.7f) {
    float capped[2] = {value, -value};
    k.soft_cap({capped, 2}, 1.0f, 2, 1);
    const double wanted = std::tanh(double{value});
    equal = equal && std::fabs(capped[0] / wanted - 1.0) < 5e-7 && std::fabs(capped[1] / wanted + 1.0) < 5e-7;
  }
  expect(equal, k.name, "soft_cap near zero", 2);
}

// Two groups, with and without a bias, in place.
void test_layer_norm(const KernelTable& k, Random& random, size_t width) {
  const size_t rows = 3, groups = 2, all = groups * width;
  const auto x = random.numbers(rows * all), weight = random.numbers(all), bias = random.numbers(all);
  bool equal = true;
  for (const float* added : {bias.data(), static_cast<const float*>(nullptr)}) {
    auto y = x;
    k.layer_norm({y.data(), all}, {weight.data(), added, 1e-3f, groups, all}, rows, {y.data(), all});
    for (size_t begin = 0; begin < rows * all; begin += width) {
      double mean = 0.0, variance = 0.0;
      for (size_t i = 0; i < width; ++i) mean += x[begin + i] / static_cast<double>(width);
      for (size_t i = 0; i < width; ++i) variance += (x[begin + i] - mean) * (x[begin + i] - mean) / static_cast<double>(width);
      for (size_t i = 0; i < width; ++i) {
        const size_t column = (begin + i) % all;
        const double scaled = (x[begin + i] - mean) / std::sqrt(variance + 1e-3) * weight[column];
        equal = equal && near(y[begin + i], scaled + (added ? added[column] : 0.0f));
      }
    }
  }
  expect(equal, k.name, "layer_norm", width);
}

void test_rowwise(const KernelTable& k, Random& random) {
  for (size_t width : kSizes) {
    const size_t rows = 3;
    const auto x = random.numbers(rows * 2 * width), weight = random.numbers(width);
    std::vector<float> y(rows * width);
    bool equal = true;

    k.rms_norm({x.data(), width}, weight.data(), false, 1e-5f, 1, width, rows, {y.data(), width});
    for (size_t r = 0; r < rows; ++r) {
      double squares = 0.0;
      for (size_t i = 0; i < width; ++i) squares += double{x[r * width + i]} * x[r * width + i];
      const double inverse = 1.0 / std::sqrt(squares / static_cast<double>(width) + 1e-5);
      for (size_t i = 0; i < width; ++i) equal = equal && near(y[r * width + i], x[r * width + i] * inverse * weight[i]);
    }
    expect(equal, k.name, "rms_norm", width);

    const auto weights = random.numbers(2 * width);
    std::vector<float> of_groups(2 * width);
    k.rms_norm({x.data(), 2 * width}, weights.data(), true, 1e-5f, 2, 2 * width, 1, {of_groups.data(), 2 * width});
    for (size_t i = 0; i < 2 * width; ++i) {
      const float* group = x.data() + i / width * width;
      double squares = 0.0;
      for (size_t j = 0; j < width; ++j) squares += double{group[j]} * group[j];
      equal = equal && near(of_groups[i], x[i] * weights[i] / std::sqrt(squares / static_cast<double>(width) + 1e-5));
    }
    expect(equal, k.name, "rms_norm of groups", width);

    test_layer_norm(k, random, width);

    auto gated = x;
    const float extreme[] = {-1e20f, -200.0f, -88.5f, -80.1f, -79.9f, -0.0f, 200.0f, 1e20f};
    for (size_t i = 0; i < width && i < std::size(extreme); ++i) gated[i] = extreme[i];
    const auto test_gated = [&](auto kernel, double (*made)(double gate, double up), const char* name) {
      kernel({gated.data(), 2 * width}, width, rows, {y.data(), width});
      for (size_t i = 0; i < rows * width; ++i) {
        const double gate = gated[i / width * 2 * width + i % width];
        const double up = gated[i / width * 2 * width + width + i % width];
        equal = equal && near(y[i], made(gate, up));
      }
      expect(equal, k.name, name, width);
    };
    test_gated(k.gated_silu, [](double x, double up) { return x / (1.0 + std::exp(-x)) * up; }, "gated_silu");
    test_gated(k.gated_gelu_tanh, [](double x, double up) { return gelu_tanh(x) * up; }, "gated_gelu_tanh");
    test_gated(k.gated_gelu, [](double x, double up) { return 0.5 * x * std::erfc(-x * std::sqrt(0.5)) * up; }, "gated_gelu");
    const auto clamped = [](double x, double up) {
      x = std::min(x, 7.0);
      return x / (1.0 + std::exp(-1.702 * x)) * (std::clamp(up, -7.0, 7.0) + 1.0);
    };
    test_gated(k.gated_clamped, clamped, "gated_clamped");

    const auto test_plain = [&](const auto& values, auto kernel, double (*made)(double value), const char* name) {
      kernel({values.data(), 2 * width}, width, rows, {y.data(), width});
      for (size_t i = 0; i < rows * width; ++i) equal = equal && near(y[i], made(values[i / width * 2 * width + i % width]));
      expect(equal, k.name, name, width);
    };
    test_plain(gated, k.gelu, [](double value) { return 0.5 * value * (1.0 + std::erf(value * std::sqrt(0.5))); }, "gelu");
    test_plain(gated, k.gelu_tanh, [](double value) {
      return 0.5 * value * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (value + 0.044715 * value * value * value)));
    }, "gelu_tanh");
    test_plain(x, k.relu_squared, [](double value) { return value > 0.0 ? value * value : 0.0; }, "relu_squared");

    auto scaled = x, capped = gated;
    k.scale({scaled.data(), 2 * width}, -1.75f, width, rows);
    k.soft_cap({capped.data(), 2 * width}, 0.5f, width, rows);
    for (size_t i = 0; i < scaled.size(); ++i) {
      const bool inside = i % (2 * width) < width;
      equal = equal && scaled[i] == (inside ? x[i] * -1.75f : x[i]);
      equal = equal && near(capped[i], inside ? 0.5 * std::tanh(gated[i] / 0.5) : gated[i]);
    }
    expect(equal, k.name, "scale and soft_cap", width);

    k.add({x.data(), width}, {weight.data(), 0}, width, rows, {y.data(), width});
    for (size_t i = 0; i < rows * width; ++i) equal = equal && y[i] == x[i] + weight[i % width];
    k.multiply({x.data(), width}, {weight.data(), 0}, width, rows, {y.data(), width});
    for (size_t i = 0; i < rows * width; ++i) equal = equal && y[i] == x[i] * weight[i % width];
    expect(equal, k.name, "add, multiply", width);

    for (DType type : kTypes) {
      const Typed vocabulary(random, 40 * width, type);
      const auto panels = packed(vocabulary.bytes.data(), 40, width, type);
      const int32_t ids[] = {39, 0, 17};
      for (Layout layout : {Layout::kRows, Layout::kPanels}) {
        const void* table = layout == Layout::kRows ? vocabulary.bytes.data() : panels.data();
        k.embed({table, type, layout, width}, ids, rows, {y.data(), width});
        for (size_t i = 0; i < rows * width; ++i) {
          equal = equal && y[i] == vocabulary.values[static_cast<size_t>(ids[i / width]) * width + i % width];
        }
        expect(equal, k.name, "embed", width);
      }
    }
  }
}

// Compares the experts of rows with ties, and the sums of their results, with plain loops.
void test_experts(const KernelTable& k, Random& random) {
  for (size_t num_experts : kSizes) {
    const size_t rows = 3, chosen = num_experts < 5 ? num_experts : 5, width = num_experts;
    auto logits = random.numbers(rows * num_experts);
    for (size_t i = 0; i < logits.size(); i += 3) logits[i] = 0.5f;
    std::vector<float> bias(num_experts);  // with differences larger than those of any scores
    for (size_t e = 0; e < num_experts; ++e) bias[e] = static_cast<float>(e * 7 % 5) * 4.0f;
    for (unsigned form = 0; form < 8; ++form) {
      const bool to_one = form & 1, is_sigmoid = form & 2, is_biased = form & 4;
      std::vector<float> routes(rows * 2 * chosen);
      const float factor = is_sigmoid ? 2.5f : 1.0f;
      k.route({{logits.data(), num_experts}, num_experts, chosen, is_sigmoid, to_one, is_biased ? bias.data() : nullptr, factor},
              rows, {routes.data(), 2 * chosen});
      bool equal = true;
      for (size_t r = 0; r < rows; ++r) {
        const float *x = logits.data() + r * num_experts, *places = routes.data() + r * 2 * chosen, *weights = places + chosen;
        const auto score = [&](size_t e) {
          return is_sigmoid ? 1.0 / (1.0 + std::exp(-double{x[e]})) : std::exp(double{x[e]});
        };
        double total = 0.0;
        for (size_t e = 0, place = 0; e < num_experts; ++e) {
          size_t before = 0;  // number of better experts
          for (size_t other = 0; other < num_experts; ++other) {
            const float step = is_biased ? bias[other] - bias[e] : 0.0f;
            before += step > 0.0f || (step == 0.0f && (x[other] > x[e] || (x[other] == x[e] && other < e)));
          }
          const bool is_chosen = before < chosen;
          if (is_chosen) equal = equal && place < chosen && places[place++] == static_cast<float>(e);
          if (to_one ? is_chosen : !is_sigmoid) total += score(e);
        }
        for (size_t i = 0; i < chosen; ++i) {
          const double divisor = to_one || !is_sigmoid ? total : 1.0;
          equal = equal && near(weights[i], score(static_cast<size_t>(places[i])) / divisor * factor);
        }
      }
      expect(equal, k.name, "route", num_experts);
    }

    const auto x = random.numbers(rows * width), weights = random.numbers(rows);
    const uint32_t places[] = {2, 0, 2};
    std::vector<float> y(rows * width);
    bool equal = true;
    k.combine({x.data(), width}, places, weights.data(), rows, width, y.data());
    for (size_t i = 0; i < width; ++i) {
      double sum = 0.0;
      for (size_t r = 0; r < rows; ++r) sum += double{weights[r]} * x[places[r] * width + i];
      equal = equal && near(y[i], sum);
    }
    k.combine({x.data(), width}, places, nullptr, rows, width, y.data());
    for (size_t i = 0; i < width; ++i) equal = equal && near(y[i], 2.0 * x[2 * width + i] + x[i]);
    expect(equal, k.name, "combine", width);
    const auto sigmoid = [](float gate) { return 1.0 / (1.0 + std::exp(-double{gate})); };
    k.sigmoid_gate({x.data(), width}, {weights.data(), 1}, false, false, width, rows, {y.data(), width});
    for (size_t i = 0; i < rows * width; ++i) equal = equal && near(y[i], x[i] * sigmoid(weights[i / width]));
    const std::vector<float> gates = random.numbers(rows * width);
    k.sigmoid_gate({x.data(), width}, {gates.data(), width}, true, true, width, rows, {y.data(), width});
    for (size_t i = 0; i < rows * width; ++i) equal = equal && near(y[i], x[i] * sigmoid(gates[i]) * gates[i]);
    expect(equal, k.name, "sigmoid_gate", width);
  }
}

// Only experts of the chosen groups are chosen, even if others have larger scores.
void test_expert_groups(const KernelTable& k, Random& random) {
  for (size_t trial = 0; trial < 20; ++trial) {
    const size_t num_groups = 6, size = 3, experts = num_groups * size, chosen = 4;
    const auto logits = random.numbers(experts), bias = random.numbers(experts);
    std::vector<double> scores(experts), sums(num_groups);
    std::vector<float> routes(2 * chosen);
    for (const bool biased : {false, true}) {
      const bool by_best = (trial & 1) != 0;
      const float* added = biased ? bias.data() : nullptr;
      k.route({{logits.data(), experts}, experts, chosen, true, false, added, 1.0f, 0.0f, num_groups, 2, by_best}, 1,
              {routes.data(), 2 * chosen});
      for (size_t e = 0; e < experts; ++e) scores[e] = 1.0 / (1.0 + std::exp(-double{logits[e]})) + (biased ? bias[e] : 0.0);
      for (size_t g = 0; g < num_groups; ++g) {
        const double* of = scores.data() + g * size;
        sums[g] = by_best ? std::max({of[0], of[1], of[2]}) : of[0] + of[1] + of[2] - std::min({of[0], of[1], of[2]});
      }
      const auto rank = [](const std::vector<double>& all, double one) {
        return std::count_if(all.begin(), all.end(), [&](double other) { return other > one; });
      };
      std::vector<double> allowed;
      for (size_t e = 0; e < experts; ++e) {
        if (rank(sums, sums[e / size]) < 2) allowed.push_back(scores[e]);
      }
      bool equal = allowed.size() == 2 * size;
      for (size_t i = 0; i < chosen; ++i) {
        const auto e = static_cast<size_t>(routes[i]);
        equal = equal && rank(sums, sums[e / size]) < 2 && rank(allowed, scores[e]) < static_cast<ptrdiff_t>(chosen);
        equal = equal && near(routes[chosen + i], 1.0 / (1.0 + std::exp(-double{logits[e]})));
      }
      expect(equal, k.name, "route in groups", trial);
    }
  }
}

// Logits 1.0, 0.9, 0.5, -3.0 and a tolerance of 0.2: the best is weighed against the second, the second against none.
void test_sparse_mixer(const KernelTable& k) {
  const float logits[] = {0.5f, 0.9f, -3.0f, 1.0f};
  float routes[4];
  k.route({{logits, 4}, 4, 2, false, false, nullptr, 1.0f, 0.2f}, 1, {routes, 4});
  const bool equal = routes[0] == 1.0f && routes[1] == 3.0f && routes[2] == 1.0f && near(routes[3], 1.0 / (1.0 + std::exp(-0.1)));
  expect(equal, k.name, "route by SparseMixer", 4);
}

// A row has experts, each only once, even if logits are NaN.
void test_routes_of_no_numbers(const KernelTable& k) {
  const float nan = std::nanf(""), logits[] = {nan, 1.0f, nan, 2.0f};
  float routes[6];
  for (const int rule : {0, 1, 2, 3}) {
    const float tolerance = rule == 2 ? 0.1f : 0.0f;
    const size_t groups = rule == 3 ? 2 : 0;
    k.route({{logits, 4}, 4, 3, rule == 1, true, nullptr, 1.0f, tolerance, groups, groups}, 1, {routes, 6});
    const bool holds = routes[0] >= 0.0f && routes[0] < routes[1] && routes[1] < routes[2] && routes[2] < 4.0f;
    expect(holds, k.name, "route of NaN", 4);
  }
}

// Runs one step of two sequences: three tokens and one, both sampled, and the first token scored. If the engine pools,
// the step only computes them.
Error run_step(Engine& engine) {
  const int32_t tokens[] = {1, 2, 3, 4}, blocks[] = {0, 1, 2, 3, 4, 5}, sample_ids[] = {1, 2, 3, 5, 0};
  const ChunkRecord chunks[] = {{0, 3, 0, 0, 3, 2}, {3, 1, 0, 3, 3, 0}};
  const uint32_t selected[] = {0, 2, 3}, mask[8] = {0xaaaaaaaa, 0, 0xffffffff};
  const ScoreRecord scores[] = {{0, 4, 2, 0}};
  SampleRecord samples[2] = {};
  samples[1] = {.seed = 7, .position = 3, .stream = 0, .selected = 2, .history_begin = 0, .history_end = 3,
                .num_prompt = 2, .bias_begin = 3, .bias_end = 4, .banned_begin = 4, .banned_end = 5, .top_k = 3,
                .temperature = 0.8f, .top_p = 0.9f, .min_p = 0.01f, .repetition_penalty = 1.2f,
                .presence_penalty = 0.1f, .frequency_penalty = 0.1f, .want_log_prob = 1, .num_top = 3, .first_top = 2,
                .first_mask = 0};
  samples[0].selected = 1;
  const float bias[5] = {};
  int32_t out[2], top_ids[5];
  double log_probs[2], score_log_probs[1], top_log_probs[5];
  StepRecord step = {.token_ids = tokens, .chunks = chunks, .block_ids = blocks, .selected_rows = selected,
                     .samples = samples, .scores = scores, .sample_ids = sample_ids, .bias_values = bias,
                     .mask_words = mask, .tokens = out, .log_probs = log_probs, .score_log_probs = score_log_probs,
                     .top_ids = top_ids, .top_log_probs = top_log_probs, .num_tokens = 4, .num_chunks = 2,
                     .num_block_ids = 6, .num_selected = 3, .num_kept = 0, .num_samples = 2, .num_scores = 1,
                     .num_sample_ids = 5, .num_top = 5, .num_mask_words = 8};
  if (!engine.step(step)) return {};
  step.num_samples = step.num_scores = 0;
  return engine.step(step);
}

uint32_t checksum(const std::vector<char>& bytes, size_t begin, size_t end) {
  uint32_t crc = ~0u;
  for (size_t i = begin; i < end; ++i) {
    crc ^= static_cast<uint8_t>(bytes[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
  }
  return ~crc;
}

void write(const std::string& path, const std::vector<char>& bytes, size_t count) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(count));
}

// Opens a file that may be damaged. If it is accepted, a step with it must be safe, too. Returns whether the step ran.
bool open_and_run(const std::string& path, const KernelTable& kernels, unsigned threads) {
  Engine engine;
  if (engine.open(path, kernels, 8, 4, {}, threads)) return false;
  return !run_step(engine);
}

void test_damaged_files(const std::string& path, const std::string& scratch) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> good((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  FileHeader header;
  std::memcpy(&header, good.data(), sizeof(header));
  for (size_t count = 0; count < good.size(); count += 1 + good.size() / 40) {
    write(scratch, good, count);
    expect(!open_and_run(scratch, portable_kernels(), 1), "portable", "truncated file", count);
  }
  Random random;
  size_t survivors = 0;
  for (int trial = 0; trial < 1500; ++trial) {
    std::vector<char> bad = good;
    const size_t tables_end = header.json_offset;
    for (uint32_t flips = 1 + random.bits() % 3; flips > 0; --flips) {
      bad[8 + random.bits() % (tables_end - 8)] ^= static_cast<char>(1u << random.bits() % 8);
    }
    const bool checksum_fits = trial % 8 != 0;
    if (checksum_fits) {
      FileHeader changed;
      std::memcpy(&changed, bad.data(), sizeof(changed));
      const size_t end = std::min<size_t>(std::max<uint64_t>(changed.metadata_bytes, 16), bad.size());
      const uint32_t crc = checksum(bad, 16, end);
      std::memcpy(&bad[offsetof(FileHeader, metadata_crc)], &crc, sizeof(crc));
    }
    write(scratch, bad, bad.size());
    const bool survived = open_and_run(scratch, portable_kernels(), 1);
    expect(checksum_fits || !survived || bad == good, "portable", "wrong checksum accepted", static_cast<size_t>(trial));
    survivors += survived;
  }
  std::printf("%zu of 1500 damaged files were still well-formed and ran\n", survivors);
}

int run(const std::vector<std::string>& engines, const std::string& scratch) {
  test_threads();
  for (const KernelTable* kernels : available_kernels()) {
    Random random;
    test_linear_layers(*kernels, random);
    test_rowwise(*kernels, random);
    test_small_numbers_under_soft_caps(*kernels);
    test_experts(*kernels, random);
    test_expert_groups(*kernels, random);
    test_sparse_mixer(*kernels);
    test_routes_of_no_numbers(*kernels);
    test_states(*kernels, random);
    test_streams(*kernels, random);
    test_attention(*kernels, random);
    test_sampling(*kernels, random);
    test_choosing(*kernels, random);
    for (const std::string& engine : engines) {
      expect(open_and_run(engine, *kernels, 2), kernels->name, "step over a good engine", 0);
    }
    std::printf("%s done\n", kernels->name);
  }
  for (const std::string& engine : engines) test_damaged_files(engine, scratch);
  return num_failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace llmserve

int main(int argc, char** argv) {
  if (argc < 3) return EXIT_FAILURE;
  return llmserve::run({argv + 2, argv + argc}, argv[1]);
}
