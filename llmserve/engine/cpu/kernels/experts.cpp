// Mixtures of experts, beside their products: which experts a row goes to, and the sum of what they make of it.
#include "rows.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// Places of the `count` largest of x[0..width) and these numbers, largest first; of equal ones the first. NaN is never
// larger, so that there are always `count` places.
void find_largest(const float* x, size_t width, size_t count, float* places, float* largest) {
  size_t found = 0;
  for (size_t i = 0; i < width; ++i) {
    if (found == count && !(x[i] > largest[count - 1])) continue;
    size_t place = found < count ? found++ : count - 1;
    for (; place > 0 && x[i] > largest[place - 1]; --place) {
      places[place] = places[place - 1];
      largest[place] = largest[place - 1];
    }
    places[place] = static_cast<float>(i);
    largest[place] = x[i];
  }
}

void sort_by_place(size_t count, float* places, float* values) {
  for (size_t end = 1; end < count; ++end) {
    const float place = places[end], value = values[end];
    size_t i = end;
    for (; i > 0 && places[i - 1] > place; --i) {
      places[i] = places[i - 1];
      values[i] = values[i - 1];
    }
    places[i] = place;
    values[i] = value;
  }
}

// y = exp(x - peak), which may be x; returns the sum.
template <class Keep>
float sum_of_exps(const float* x, size_t width, F32x16 peak, Keep keep) {
  F32x16 sums = zero();
  for_lanes(
      width,
      [&](size_t i) {
        const F32x16 y = exp(load(x + i) - peak);
        sums = sums + y;
        keep(i, y, kLanes);
      },
      [&](size_t i, size_t n) {
        float lanes[kLanes] = {};
        store_partial(lanes, exp(load_partial(x + i, n) - peak), n);
        sums = sums + load(lanes);
        keep(i, load(lanes), n);
      });
  return reduce_add(sums);
}

}  // namespace

void route(View<const float> logits, size_t num_experts, size_t chosen, bool renormalize, size_t num_rows, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const float* x = logits.row(r);
    float *places = y.row(r), *weights = places + chosen;
    find_largest(x, num_experts, chosen, places, weights);
    const F32x16 peak = broadcast(weights[0]);
    sort_by_place(chosen, places, weights);
    const float of_chosen = sum_of_exps(weights, chosen, peak, [&](size_t i, F32x16 value, size_t n) {
      store_lanes(weights + i, value, n);
    });
    const float total = renormalize ? of_chosen : sum_of_exps(x, num_experts, peak, [](size_t, F32x16, size_t) {});
    for (size_t i = 0; i < chosen; ++i) weights[i] /= total;
  }
}

void combine(View<const float> x, const uint32_t* places, const float* weights, size_t count, size_t width, float* y) {
  const auto sum = [&](size_t i, size_t n) {
    F32x16 total = zero();
    for (size_t k = 0; k < count; ++k) {
      total = fma(load_lanes(x.row(places[k]) + i, n), broadcast(weights[k]), total);
    }
    store_lanes(y + i, total, n);
  };
  for_lanes(width, [&](size_t i) { sum(i, kLanes); }, sum);
}

void sigmoid_gate(View<const float> x, View<const float> gate, size_t width, size_t num_rows, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const float* source = x.row(r);
    float* target = y.row(r);
    const F32x16 divisor = broadcast(1.0f) + exp(zero() - broadcast(gate.row(r)[0]));
    for_lanes(
        width, [&](size_t i) { store(target + i, load(source + i) / divisor); },
        [&](size_t i, size_t n) { store_partial(target + i, load_partial(source + i, n) / divisor, n); });
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
