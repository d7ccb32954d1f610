// Ops with a state of each sequence: a short convolution, and the gated delta rule.
//
// Both go through the tokens of a sequence one by one, whatever it was cut into: a token's results depend on the state
// before it only. Columns are independent of each other.
#include "rows.h"
#include "tile.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

constexpr float kLeastLength = 1e-6f;  // squared, of what is divided by its length

// Columns [i, i + n) of a convolution.
void convolve(const ConvolutionArgs& args, size_t i, size_t n) {
  F32x16 weights[kMaxTaps];
  for (size_t tap = 0; tap < args.taps; ++tap) {
    float lanes[kLanes] = {};
    for (size_t lane = 0; lane < n; ++lane) lanes[lane] = args.weight[(i + lane) * args.taps + tap];
    weights[tap] = load(lanes);
  }
  const size_t num_before = args.taps - 1;
  const auto row = [&](size_t place) {  // among the rows before and those of x
    if (place >= num_before) return load_lanes(args.x.row(place - num_before) + i, n);
    return args.before ? load_lanes(args.before + place * args.width + i, n) : zero();
  };
  const F32x16 bias = args.bias ? load_lanes(args.bias + i, n) : zero();
  for (size_t r = 0; r < args.num_rows; ++r) {
    F32x16 y = bias;
    for (size_t tap = 0; tap < args.taps; ++tap) y = fma(weights[tap], row(r + tap), y);
    store_lanes(args.y.row(r) + i, args.silu ? y / (broadcast(1.0f) + exp(zero() - y)) : y, n);
  }
  for (size_t place = 0; place < num_before; ++place) {  // upwards: the rows that are read lie behind
    store_lanes(args.after + place * args.width + i, row(args.num_rows + place), n);
  }
}

// y = x * factor / length of x
void normalize_length(const float* x, size_t width, float factor, float* y) {
  F32x16 squares = zero();
  const auto add = [&](size_t i, size_t n) {
    const F32x16 v = load_lanes(x + i, n);
    squares = fma(v, v, squares);
  };
  for_lanes(width, [&](size_t i) { add(i, kLanes); }, add);
  const F32x16 scale = broadcast(factor / __builtin_sqrtf(reduce_add(squares) + kLeastLength));
  const auto multiply = [&](size_t i, size_t n) { store_lanes(y + i, load_lanes(x + i, n) * scale, n); };
  for_lanes(width, [&](size_t i) { multiply(i, kLanes); }, multiply);
}

// What a token does to a head.
struct TokenOfHead {
  const float* q;  // [key_dim], as they are multiplied with the state
  const float* k;
  const float* v;  // of the panel's columns, like y
  float kept;      // of the state
  float beta;
  float* y;
};

// V vectors of a panel of the state from `column` on; rows of the panel are `width` columns.
template <size_t V>
void change_state(const TokenOfHead& token, float* panel, size_t key_dim, size_t width, size_t column) {
  F32x16 found[V], sums[V];
  unroll<V>([&](auto v) __attribute__((always_inline)) { found[v] = sums[v] = zero(); });
  float* place = panel + column;
  for (size_t k = 0; k < key_dim; ++k, place += width) {
    const F32x16 key = broadcast(token.k[k]);
    unroll<V>([&](auto v) __attribute__((always_inline)) { found[v] = fma(key, load(place + v * kLanes), found[v]); });
  }
  const F32x16 kept = broadcast(token.kept), beta = broadcast(token.beta);
  unroll<V>([&](auto v) __attribute__((always_inline)) {
    found[v] = (load(token.v + column + v * kLanes) - found[v] * kept) * beta;
  });
  place = panel + column;
  for (size_t k = 0; k < key_dim; ++k, place += width) {
    const F32x16 key = broadcast(token.k[k]), query = broadcast(token.q[k]);
    unroll<V>([&](auto v) __attribute__((always_inline)) {
      const F32x16 changed = fma(key, found[v], load(place + v * kLanes) * kept);
      store(place + v * kLanes, changed);
      sums[v] = fma(query, changed, sums[v]);
    });
  }
  unroll<V>([&](auto v) __attribute__((always_inline)) { store(token.y + column + v * kLanes, sums[v]); });
}

// The same for the last n columns.
void change_rest(const TokenOfHead& token, float* panel, size_t key_dim, size_t width, size_t column, size_t n) {
  F32x16 found = zero(), sums = zero();
  for (size_t k = 0; k < key_dim; ++k) {
    found = fma(broadcast(token.k[k]), load_partial(panel + k * width + column, n), found);
  }
  const F32x16 kept = broadcast(token.kept);
  found = (load_partial(token.v + column, n) - found * kept) * broadcast(token.beta);
  for (size_t k = 0; k < key_dim; ++k) {
    float* place = panel + k * width + column;
    const F32x16 changed = fma(broadcast(token.k[k]), found, load_partial(place, n) * kept);
    store_partial(place, changed, n);
    sums = fma(broadcast(token.q[k]), changed, sums);
  }
  store_partial(token.y + column, sums, n);
}

// By the C library in double precision: two numbers for each token of a head.
float kept_part(float decay, float gate) {
  const double x = gate, grown = x > 20.0 ? x : __builtin_log1p(__builtin_exp(x));
  return static_cast<float>(__builtin_exp(-__builtin_exp(double{decay}) * grown));
}
float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + __builtin_exp(-double{x}))); }

}  // namespace

void convolution(const ConvolutionArgs& args, size_t begin, size_t end) {
  for_lanes(
      end - begin, [&](size_t i) { convolve(args, begin + i, kLanes); },
      [&](size_t i, size_t n) { convolve(args, begin + i, n); });
}

void delta_rule(const DeltaRuleArgs& args, size_t head, size_t begin, size_t end) {
  const size_t key_dim = args.key_dim, key_width = args.num_key_heads * key_dim, width = end - begin;
  const size_t key_begin = head / (args.num_heads / args.num_key_heads) * key_dim;
  const size_t first = head * args.value_dim + begin;
  float* panel = args.after + first * key_dim;
  if (!args.before) {
    __builtin_memset(panel, 0, key_dim * width * sizeof(float));
  } else if (args.before != args.after) {
    __builtin_memcpy(panel, args.before + first * key_dim, key_dim * width * sizeof(float));
  }
  float q[kMaxHeadDim], k[kMaxHeadDim];
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(key_dim));
  for (size_t r = 0; r < args.num_rows; ++r) {
    const float *row = args.qkv.row(r), *gates = args.gates.row(r);
    normalize_length(row + key_begin, key_dim, scale, q);
    normalize_length(row + key_width + key_begin, key_dim, 1.0f, k);
    const float kept = kept_part(args.decay[head], gates[args.num_heads + head] + args.bias[head]);
    const TokenOfHead token = {q, k, row + 2 * key_width + first, kept, sigmoid(gates[head]), args.y.row(r) + first};
    size_t column = 0;
    for (; column + 4 * kLanes <= width; column += 4 * kLanes) change_state<4>(token, panel, key_dim, width, column);
    for (; column + kLanes <= width; column += kLanes) change_state<1>(token, panel, key_dim, width, column);
    if (column < width) change_rest(token, panel, key_dim, width, column, width - column);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
