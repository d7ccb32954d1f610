// Mixtures of experts, except for the linear layers: the experts of a row, and the sum of their results.
#include "rows.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

constexpr float kLeastTotal = 1e-20f;  // lower bound of the sum by which scores are divided

// Finds the `count` largest of `width` numbers and their places, largest first, ties by place. NaN is never larger, so
// there are always `count` places. numbers(i, n) returns n numbers from the i-th on.
template <class Numbers>
void find_largest(size_t width, size_t count, float* places, float* largest, Numbers numbers) {
  size_t found = 0;
  float x[kLanes];
  const auto look = [&](size_t begin, size_t n) {
    store_lanes(x, numbers(begin, n), n);
    for (size_t i = 0; i < n; ++i) {
      if (found == count && !(x[i] > largest[count - 1])) continue;
      size_t place = found < count ? found++ : count - 1;
      for (; place > 0 && x[i] > largest[place - 1]; --place) {
        places[place] = places[place - 1];
        largest[place] = largest[place - 1];
      }
      places[place] = static_cast<float>(begin + i);
      largest[place] = x[i];
    }
  };
  for_lanes(width, [&](size_t i) { look(i, kLanes); }, look);
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

// Calls keep(i, exp(x - peak), n) for a row in pieces of n numbers; returns the sum. `keep` may overwrite x.
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

// Routes by logits: the largest logits are those of the largest softmax.
void route_by_logit(const RouteArgs& args, const float* x, float* places, float* weights) {
  find_largest(args.num_experts, args.chosen, places, weights, [&](size_t i, size_t n) { return load_lanes(x + i, n); });
  const F32x16 peak = broadcast(weights[0]);
  sort_by_place(args.chosen, places, weights);
  const float of_chosen = sum_of_exps(weights, args.chosen, peak, [&](size_t i, F32x16 value, size_t n) {
    store_lanes(weights + i, value, n);
  });
  const float total = args.to_one ? of_chosen : sum_of_exps(x, args.num_experts, peak, [](size_t, F32x16, size_t) {});
  for (size_t i = 0; i < args.chosen; ++i) weights[i] /= total;
}

// Determines the groups of experts to choose from. choice(i, n) returns n scores from the i-th on.
template <class Choice>
void choose_groups(const RouteArgs& args, bool* chosen, Choice choice) {
  float sums[kMaxExpertGroups], places[kMaxExpertGroups], largest[kMaxExpertGroups];
  const size_t size = args.num_experts / args.num_groups;
  for (size_t g = 0; g < args.num_groups; ++g) {
    find_largest(size, args.by_best ? 1 : 2, places, largest, [&](size_t i, size_t n) { return choice(g * size + i, n); });
    sums[g] = args.by_best ? largest[0] : largest[0] + largest[1];
    chosen[g] = false;
  }
  find_largest(args.num_groups, args.chosen_groups, places, largest, [&](size_t i, size_t n) { return load_lanes(sums + i, n); });
  for (size_t i = 0; i < args.chosen_groups; ++i) chosen[static_cast<size_t>(places[i])] = true;
}

void route_by_score(const RouteArgs& args, const float* x, float* places, float* weights) {
  F32x16 peak = zero(), divisor = zero();
  if (!args.is_sigmoid) {
    float largest = -__builtin_inff();
    for (size_t e = 0; e < args.num_experts; ++e) largest = x[e] > largest ? x[e] : largest;
    peak = broadcast(largest);
    divisor = broadcast(sum_of_exps(x, args.num_experts, peak, [](size_t, F32x16, size_t) {}));
  }
  const auto score = [&](F32x16 logits) {
    return args.is_sigmoid ? broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - logits)) : exp(logits - peak) / divisor;
  };
  const auto choice = [&](size_t i, size_t n) {
    const F32x16 logits = load_lanes(x + i, n);
    if (args.bias) return score(logits) + load_lanes(args.bias + i, n);
    return args.num_groups ? score(logits) : logits;  // distinct logits can have equal scores
  };
  if (args.num_groups == 0) {
    find_largest(args.num_experts, args.chosen, places, weights, choice);
  } else {
    bool allowed[kMaxExpertGroups];
    choose_groups(args, allowed, choice);
    const size_t size = args.num_experts / args.num_groups;
    find_largest(args.num_experts, args.chosen, places, weights, [&](size_t i, size_t n) {
      float lanes[kLanes];
      store(lanes, choice(i, n));
      for (size_t j = 0; j < n; ++j) lanes[j] = allowed[(i + j) / size] ? lanes[j] : -__builtin_inff();
      return load(lanes);
    });
  }
  sort_by_place(args.chosen, places, weights);
  for (size_t i = 0; i < args.chosen; ++i) weights[i] = x[static_cast<size_t>(places[i])];
  F32x16 sums = zero();
  const auto weigh = [&](size_t i, size_t n) {
    store_lanes(weights + i, score(load_lanes(weights + i, n)), n);
    sums = sums + load_lanes(weights + i, n);
  };
  for_lanes(args.chosen, [&](size_t i) { weigh(i, kLanes); }, weigh);
  const float total = reduce_add(sums);
  for (size_t i = 0; args.to_one && i < args.chosen; ++i) weights[i] /= total > kLeastTotal ? total : kLeastTotal;
}

// SparseMixer's rule (Liu et al., 2024), as used at inference.
void route_by_mixer(const RouteArgs& args, const float* x, float* places, float* weights) {
  find_largest(args.num_experts, args.chosen, places, weights, [&](size_t i, size_t n) { return load_lanes(x + i, n); });
  for (size_t i = 0; i < args.chosen; ++i) {
    const float peak = weights[i];
    F32x16 sums = zero();
    const auto add = [&](size_t begin, size_t n) {
      float lanes[kLanes];
      for (size_t j = 0; j < kLanes; ++j) {
        lanes[j] = -__builtin_inff();
        if (j >= n) continue;
        const float logit = x[begin + j], size = __builtin_fabsf(logit) > peak ? __builtin_fabsf(logit) : peak;
        bool counts = !((peak - logit) / size > args.tolerance);
        for (size_t k = 0; k < i; ++k) counts = counts && places[k] != static_cast<float>(begin + j);
        if (counts) lanes[j] = logit - peak;
      }
      sums = sums + exp(load(lanes));
    };
    for_lanes(args.num_experts, [&](size_t begin) { add(begin, kLanes); }, add);
    weights[i] = 1.0f / reduce_add(sums);
  }
  sort_by_place(args.chosen, places, weights);
}

}  // namespace

void route(const RouteArgs& args, size_t num_rows, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    float *places = y.row(r), *weights = places + args.chosen;
    if (args.tolerance > 0.0f) {
      route_by_mixer(args, args.logits.row(r), places, weights);
    } else if (args.is_sigmoid || args.bias || args.num_groups) {
      route_by_score(args, args.logits.row(r), places, weights);
    } else {
      route_by_logit(args, args.logits.row(r), places, weights);
    }
    if (args.factor != 1.0f) {
      for (size_t i = 0; i < args.chosen; ++i) weights[i] *= args.factor;
    }
    for (size_t i = 0; args.scales && i < args.chosen; ++i) weights[i] *= args.scales[static_cast<size_t>(places[i])];
  }
}

void combine(View<const float> x, const uint32_t* places, const float* weights, size_t count, size_t width, float* y) {
  const auto sum = [&](size_t i, size_t n) {
    F32x16 total = zero();
    for (size_t k = 0; k < count; ++k) {
      const F32x16 row = load_lanes(x.row(places[k]) + i, n);
      total = weights ? fma(row, broadcast(weights[k]), total) : row + total;
    }
    store_lanes(y + i, total, n);
  };
  for_lanes(width, [&](size_t i) { sum(i, kLanes); }, sum);
}

void sigmoid_gate(View<const float> x, View<const float> gate, bool is_wide, bool silu, size_t width, size_t num_rows,
                  View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const auto gated = [&](size_t i, size_t n) {
      const F32x16 g = is_wide ? load_lanes(gate.row(r) + i, n) : broadcast(gate.row(r)[0]);
      const F32x16 found = load_lanes(x.row(r) + i, n) / (broadcast(1.0f) + exp(zero() - g));
      store_lanes(y.row(r) + i, silu ? found * g : found, n);
    };
    for_lanes(width, [&](size_t i) { gated(i, kLanes); }, gated);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
