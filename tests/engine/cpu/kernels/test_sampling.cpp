// Tests of passes over logits, and of sampling.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "isa.h"
#include "sampling.h"
#include "scoring.h"
#include "test_support.h"

namespace llmserve {
namespace {

constexpr float kInfinity = HUGE_VALF;
constexpr size_t kWide = 40'001;  // not a multiple of a block; more blocks than the first search for a nucleus covers

// Requests with every combination of filters.
std::vector<SampleRecord> requests() {
  std::vector<SampleRecord> found;
  for (float temperature : {0.0f, 0.7f}) {
    for (uint32_t top_k : {0u, 9000u}) {
      for (float top_p : {1.0f, 0.6f}) {
        for (float min_p : {0.0f, 0.02f}) {
          SampleRecord request = {};
          request.temperature = temperature;
          request.top_k = top_k;
          request.top_p = top_p;
          request.min_p = min_p;
          request.repetition_penalty = 1.0f;
          request.seed = found.size();
          found.push_back(request);
        }
      }
    }
  }
  return found;
}

// Logits like those of a network: most are low, few are high.
std::vector<float> wide_row(Random& random) {
  std::vector<float> x = random.numbers(kWide);
  for (float& value : x) value = value * value * value * 12.0f;
  return x;
}

// Puts NaN, infinite, huge or tiny numbers into the row, as specified by `kind`.
void spoil(std::vector<float>& x, size_t kind) {
  const float nan = std::nanf(""), most = std::numeric_limits<float>::max(), least = 1e-42f;
  const float values[] = {nan, -kInfinity, kInfinity, most, -most, 0.0f, -0.0f, least, -least};
  for (size_t i = 0; i < x.size(); ++i) {
    if (kind < std::size(values)) x[i] = values[kind];                  // all equal
    if (kind == std::size(values)) x[i] = values[i % std::size(values)];  // all mixed
    if (kind == std::size(values) + 1 && i % 2) x[i] = values[i % 5];   // every second one
    if (kind == std::size(values) + 2 && i != 39'990) x[i] = -kInfinity;  // one is left
  }
}
constexpr size_t kNumKinds = 13;  // the last one changes nothing

// Compares rows with NaN and infinities with plain loops; peaks must be bitwise identical.
void test_passes(const KernelTable& k, Random& random) {
  for (size_t count : {1, 15, 16, 63, 64, 65, 128, 300}) {
    std::vector<float> x = random.numbers(count);
    for (size_t i = 0; i < count; i += 7) x[i] = i % 2 ? std::nanf("") : -kInfinity;
    if (count > 200) x[170] = kInfinity;
    const size_t num_blocks = (count + kVocabularyBlock - 1) / kVocabularyBlock;
    std::vector<float> peaks(num_blocks), y(count);
    std::vector<double> sums(num_blocks);
    const Softmax softmax = {1.0f, 0.5f};
    k.block_peaks(x.data(), count, peaks.data());
    if (count > 200) x[170] = 1.0f;
    k.block_weights(x.data(), count, softmax, sums.data());
    k.weights(x.data(), count, softmax, y.data());
    for (size_t b = 0; b < num_blocks; ++b) {
      float peak = -kInfinity;
      double sum = 0.0;
      for (size_t i = b * kVocabularyBlock; i < std::min(count, (b + 1) * kVocabularyBlock); ++i) {
        const double weight = std::isnan(x[i]) ? 0.0 : std::exp((x[i] - 1.0) / 0.5);
        expect(near(y[i], weight), k.name, "weights", count);
        if (x[i] > peak) peak = x[i];
        sum += weight;
      }
      if (count > 200 && b == 170 / kVocabularyBlock) peak = std::numeric_limits<float>::max();
      expect(peaks[b] == peak, k.name, "block_peaks", count);
      expect(near(sums[b], sum), k.name, "block_weights", count);
    }
  }
}

void test_sampler(const KernelTable& k) {
  const float nan = std::nanf("");
  const float rows[][4] = {{nan, 1, nan, 2}, {nan, nan, nan, nan}, {-kInfinity, -kInfinity, -kInfinity, -kInfinity},
                           {kInfinity, 3, kInfinity, nan}, {1, 1, 1, 1}};
  const int32_t greedy[] = {3, 0, 0, 0, 0};
  const int32_t ids[] = {0, 1, 2, 3};
  Sampler sampler(k, 4);
  Scorer scorer(k, 4);
  int32_t top_ids[4];
  double top_log_probs[4];
  StepRecord step = {};
  step.sample_ids = ids;
  for (size_t i = 0; i < std::size(rows); ++i) {
    SampleRecord request = {};
    request.repetition_penalty = request.top_p = 1.0f;
    expect(sampler.sample(rows[i], step, request) == greedy[i], k.name, "greedy sampling", i);
    scorer.score(rows[i], greedy[i], top_ids, top_log_probs);
    expect(top_ids[0] == greedy[i] && top_log_probs[0] >= top_log_probs[3], k.name, "most likely tokens", i);
    request.temperature = 1e-30f;
    request.top_p = 0.5f;
    request.min_p = 0.1f;
    request.top_k = 2;
    request.banned_end = 4;  // all tokens
    const int32_t token = sampler.sample(rows[i], step, request);
    expect(token >= 0 && token < 4, k.name, "sampling with everything banned", i);
    request.banned_end = 0;
    for (request.position = 0; request.position < 20; ++request.position) sampler.sample(rows[i], step, request);
    request.first_mask = 0;
    for (uint32_t mask : {0b0010u, 0b0110u, 0b1111u}) {
      step.mask_words = &mask;
      for (request.banned_end = 0; request.banned_end <= 4; request.banned_end += 4) {
        const int32_t chosen = sampler.sample(rows[i], step, request);
        expect(chosen >= 0 && chosen < 4 && (mask >> chosen & 1), k.name, "sampling under a mask", i);
      }
    }
  }
}

// The most likely tokens must equal the first ones of a plain sort, for any number; steps of 0.001 make many ties.
void test_top(const KernelTable& k, Random& random) {
  for (size_t count : {1, 63, 64, 300, 5000}) {
    std::vector<float> x = random.numbers(count);
    if (count > 200) x[170] = std::nanf("");
    std::vector<int32_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = static_cast<int32_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return cleaned(x[static_cast<size_t>(a)]) > cleaned(x[static_cast<size_t>(b)]);
    });
    Scorer scorer(k, count);
    for (size_t num_top : {size_t{1}, std::min<size_t>(20, count), count}) {
      std::vector<int32_t> ids(num_top);
      std::vector<double> log_probs(num_top);
      scorer.score(x.data(), 0, ids, log_probs.data());
      expect(std::equal(ids.begin(), ids.end(), order.begin()), k.name, "most likely tokens of", count);
      expect(std::is_sorted(log_probs.rbegin(), log_probs.rend()), k.name, "their log-probs", count);
    }
  }
}

// Few tokens and many, sorted by comparison and by radix: each filter must keep the same tokens as a plain sort.
void test_filters(const KernelTable& k, Random& random) {
  constexpr size_t kCount = 5000;
  std::vector<float> x = random.numbers(kCount);  // steps of 0.001: many ties
  std::vector<size_t> order(kCount);
  for (size_t i = 0; i < kCount; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
  Sampler sampler(k, kCount);
  StepRecord step = {};
  for (uint32_t top_k : {0u, 3u, 60u, 1000u, 4000u}) {
    for (float top_p : {0.01f, 0.3f, 0.9f}) {
      SampleRecord request = {};
      request.temperature = 0.7f;
      request.top_k = top_k;
      request.top_p = top_p;
      request.repetition_penalty = 1.0f;
      const size_t num_top = top_k ? top_k : kCount;
      const float least = x[order[num_top - 1]];
      double total = 0.0, sum = 0.0;
      for (float value : x) total += value >= least ? std::exp(value / 0.7) : 0.0;
      size_t kept = 0;
      while (sum < top_p * total * (1 + 1e-5)) sum += std::exp(x[order[kept++]] / 0.7);
      for (request.position = 0; request.position < 300; ++request.position) {
        // the draw determines the token's place in the sorted order
        double left = uniform(0, request.position, 0) * sum;
        size_t place = 0;
        while (left >= std::exp(x[order[place]] / 0.7)) left -= std::exp(x[order[place++]] / 0.7);
        const auto token = static_cast<size_t>(sampler.sample(x.data(), step, request));
        const auto found = static_cast<size_t>(std::find(order.begin(), order.end(), token) - order.begin());
        expect(found <= kept && (found > place ? found - place : place - found) <= 1, k.name, "filters", found);
      }
    }
  }
}

// Results must be bitwise identical to the portable kernels' for any logits, and tokens must be ones that may be drawn.
void test_wide_rows(const KernelTable& k, const KernelTable& portable, Random& random) {
  const size_t num_blocks = (kWide + kVocabularyBlock - 1) / kVocabularyBlock;
  std::vector<float> peaks[2] = {std::vector<float>(num_blocks), std::vector<float>(num_blocks)};
  std::vector<double> sums[2] = {std::vector<double>(num_blocks), std::vector<double>(num_blocks)};
  std::vector<float> y[2] = {std::vector<float>(kWide), std::vector<float>(kWide)};
  const auto same = [](const auto& a) { return !std::memcmp(a[0].data(), a[1].data(), a[0].size() * sizeof(a[0][0])); };
  Sampler sampler(k, kWide), other(portable, kWide);
  Scorer scorer(k, kWide), other_scorer(portable, kWide);
  int32_t top[2][20];
  double top_log_probs[2][20];
  const int32_t history[] = {5, 5, 39'990, 7};
  StepRecord step = {};
  step.sample_ids = history;
  for (size_t kind = 0; kind < kNumKinds; ++kind) {
    std::vector<float> x = wide_row(random);
    spoil(x, kind);
    for (int i = 0; i < 2; ++i) {
      const KernelTable& kernels = i ? portable : k;
      kernels.block_peaks(x.data(), kWide, peaks[i].data());
      kernels.block_weights(x.data(), kWide, {1.5f, 0.7f}, sums[i].data());
      kernels.weights(x.data(), kWide, {1.5f, 0.7f}, y[i].data());
    }
    expect(same(peaks) && same(sums) && same(y), k.name, "the same bits in passes over kind", kind);
    for (SampleRecord request : requests()) {
      request.history_end = request.seed % 2 ? 4 : 0;
      request.repetition_penalty = 1.5f;
      const int32_t token = sampler.sample(x.data(), step, request), twin = other.sample(x.data(), step, request);
      const double log_prob = scorer.score(x.data(), token, top[0], top_log_probs[0]);
      const double log_prob_twin = other_scorer.score(x.data(), twin, top[1], top_log_probs[1]);
      expect(token == twin, k.name, "the same token from kind", kind);
      expect(std::bit_cast<uint64_t>(log_prob) == std::bit_cast<uint64_t>(log_prob_twin) && !std::isnan(log_prob),
             k.name, "the same log-prob from kind", kind);
      expect(!std::memcmp(top[0], top[1], sizeof(top[0])) &&
                 !std::memcmp(top_log_probs[0], top_log_probs[1], sizeof(top_log_probs[0])),
             k.name, "the same most likely tokens from kind", kind);
      const bool none = kind < 2;
      expect(token >= 0 && static_cast<size_t>(token) < kWide && (none ? token == 0 : x[token] > -kInfinity), k.name,
             "a token that may be drawn from kind", kind);
    }
  }
}

}  // namespace

void test_sampling(const KernelTable& k, Random& random) {
  test_passes(k, random);
  test_sampler(k);
  test_top(k, random);
  test_filters(k, random);
  test_wide_rows(k, *available_kernels().front(), random);
}

}  // namespace llmserve
