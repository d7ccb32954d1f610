// Ops with a state for each sequence: a short convolution, the gated delta rule, and Mamba2's scan.
//
// All of them process the tokens of a sequence one by one, however the sequence is divided into chunks: a token's
// results depend only on the state before it. Columns are independent of each other.
#include "rows.h"
#include "tile.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

constexpr float kLeastLength = 1e-6f;  // added to the squared length by which a vector is divided

// Computes columns [i, i + n) of a convolution.
void convolve(const ConvolutionArgs& args, size_t i, size_t n) {
  F32x16 weights[kMaxTaps];
  for (size_t tap = 0; tap < args.taps; ++tap) {
    float lanes[kLanes] = {};
    for (size_t lane = 0; lane < n; ++lane) lanes[lane] = args.weight[(i + lane) * args.taps + tap];
    weights[tap] = load(lanes);
  }
  const size_t num_before = args.taps - 1;
  const auto row = [&](size_t place) {  // counted from the first row before x
    if (place >= num_before) return load_lanes(args.x.row(place - num_before) + i, n);
    return args.before ? load_lanes(args.before + place * args.width + i, n) : zero();
  };
  const F32x16 bias = args.bias ? load_lanes(args.bias + i, n) : zero();
  for (size_t r = 0; r < args.num_rows; ++r) {
    F32x16 y = bias;
    for (size_t tap = 0; tap < args.taps; ++tap) y = fma(weights[tap], row(r + tap), y);
    store_lanes(args.y.row(r) + i, args.silu ? y / (broadcast(1.0f) + exp(zero() - y)) : y, n);
  }
  for (size_t place = 0; place < num_before; ++place) {  // ascending: reads are ahead of writes
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

// Computed by the C library in double precision: only two numbers per token and head.
double softplus(double x) { return x > 20.0 ? x : __builtin_log1p(__builtin_exp(x)); }
float kept_part(float decay, double grown) {
  return static_cast<float>(__builtin_exp(-__builtin_exp(double{decay}) * grown));
}
float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + __builtin_exp(-double{x}))); }

// Prepares a panel of the state: copies it from `before`, or zeroes it. `count` numbers from `place` on.
float* panel_of(const float* before, float* after, size_t place, size_t count) {
  const size_t num_bytes = count * sizeof(float);
  if (!before) {
    __builtin_memset(after + place, 0, num_bytes);
  } else if (before != after) {
    __builtin_memcpy(after + place, before + place, num_bytes);
  }
  return after + place;
}

// One token for one head, as the state needs it.
struct Token {
  float q[kMaxHeadDim], k[kMaxHeadDim];
  float kept;  // factor of the state
  float beta;
};

// Vectors of columns that, with their sums, stay in registers.
#if defined(LLMSERVE_USE_AVX512)
constexpr size_t kVectors = 4;
#else
constexpr size_t kVectors = 2;
#endif

// Columns [begin, end) of a head's values, which are a panel of its state: [key_dim, end - begin].
class HeadPanel {
 public:
  HeadPanel(const DeltaRuleArgs& args, size_t head, size_t begin, size_t end)
      : args_(args), head_(head), key_begin_(head / (args.num_heads / args.num_key_heads) * args.key_dim),
        first_(head * args.value_dim + begin), width_(end - begin),
        panel_(panel_of(args.before, args.after, first_ * args.key_dim, args.key_dim * width_)) {}

  void run() const {
    size_t column = 0;
    for (; column + kVectors * kLanes <= width_; column += kVectors * kLanes) change<kVectors>(column, kLanes);
    for (; column < width_; column += kLanes) change<1>(column, width_ - column < kLanes ? width_ - column : kLanes);
  }

 private:
  void prepare(size_t r, Token& token) const {
    const float *row = args_.qkv.row(r), *gates = args_.gates.row(r), *keys = row + args_.num_key_heads * args_.key_dim;
    normalize_length(row + key_begin_, args_.key_dim, 1.0f / __builtin_sqrtf(static_cast<float>(args_.key_dim)), token.q);
    normalize_length(keys + key_begin_, args_.key_dim, 1.0f, token.k);
    token.kept = kept_part(args_.decay[head_], softplus(gates[args_.num_heads + head_] + args_.bias[head_]));
    token.beta = sigmoid(gates[head_]);
  }

  // Processes V vectors of columns, or the first n of one, for all tokens. While a token changes the state, the next
  // token's sum over it is computed. So a token reads and writes the state once, in the same order as in two passes.
  template <size_t V>
  void change(size_t column, size_t n) const {
    const auto at = [&](const float* from, size_t v) __attribute__((always_inline)) {
      return V > 1 ? load(from + v * kLanes) : load_lanes(from, n);
    };
    const auto put = [&](float* to, size_t v, F32x16 x) __attribute__((always_inline)) {
      return V > 1 ? store(to + v * kLanes, x) : store_lanes(to, x, n);
    };
    const float* values = args_.qkv.data + 2 * args_.num_key_heads * args_.key_dim + first_ + column;
    Token tokens[2];
    F32x16 found[V];
    unroll<V>([&](auto v) __attribute__((always_inline)) { found[v] = zero(); });
    prepare(0, tokens[0]);
    for (size_t k = 0; k < args_.key_dim; ++k) {
      const F32x16 key = broadcast(tokens[0].k[k]);
      const float* place = panel_ + k * width_ + column;
      unroll<V>([&](auto v) __attribute__((always_inline)) { found[v] = fma(key, at(place, v), found[v]); });
    }
    for (size_t r = 0; r < args_.num_rows; ++r) {
      const Token& token = tokens[r % 2];
      Token& next = tokens[(r + 1) % 2];
      if (r + 1 < args_.num_rows) prepare(r + 1, next);
      const float* next_keys = r + 1 < args_.num_rows ? next.k : token.k;  // not used after the last token
      const F32x16 kept = broadcast(token.kept), beta = broadcast(token.beta);
      F32x16 added[V], sums[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        added[v] = (at(values + r * args_.qkv.stride, v) - found[v] * kept) * beta;
        found[v] = sums[v] = zero();
      });
      float* place = panel_ + column;
      for (size_t k = 0; k < args_.key_dim; ++k, place += width_) {
        const F32x16 key = broadcast(token.k[k]), query = broadcast(token.q[k]), following = broadcast(next_keys[k]);
        unroll<V>([&](auto v) __attribute__((always_inline)) {
          const F32x16 changed = fma(key, added[v], at(place, v) * kept);
          put(place, v, changed);
          sums[v] = fma(query, changed, sums[v]);
          found[v] = fma(following, changed, found[v]);
        });
      }
      float* y = args_.y.row(r) + first_ + column;
      unroll<V>([&](auto v) __attribute__((always_inline)) { put(y, v, sums[v]); });
    }
  }

  const DeltaRuleArgs& args_;
  const size_t head_, key_begin_, first_, width_;
  float* const panel_;
};

// One token for one head of a scan.
struct ScannedToken {
  const float *b, *c;  // [state_size]
  size_t state_size;
  float kept, step, skip;
};

// Updates the state in `panel`, with rows of `width`, and writes y: V vectors of columns, or the first n of one.
template <size_t V>
[[gnu::always_inline]] inline void scan(const ScannedToken& token, const float* x, float* panel, size_t width, size_t n,
                                        float* y) {
  const auto at = [&](const float* from, size_t v) __attribute__((always_inline)) {
    return V > 1 ? load(from + v * kLanes) : load_lanes(from, n);
  };
  const auto put = [&](float* to, size_t v, F32x16 value) __attribute__((always_inline)) {
    return V > 1 ? store(to + v * kLanes, value) : store_lanes(to, value, n);
  };
  const F32x16 kept = broadcast(token.kept);
  F32x16 added[V], sums[V];
  unroll<V>([&](auto v) __attribute__((always_inline)) {
    const F32x16 value = at(x, v);
    added[v] = value * broadcast(token.step);
    sums[v] = value * broadcast(token.skip);
  });
  for (size_t i = 0; i < token.state_size; ++i, panel += width) {
    const F32x16 b = broadcast(token.b[i]), c = broadcast(token.c[i]);
    unroll<V>([&](auto v) __attribute__((always_inline)) {
      const F32x16 changed = fma(b, added[v], at(panel, v) * kept);
      put(panel, v, changed);
      sums[v] = fma(c, changed, sums[v]);
    });
  }
  unroll<V>([&](auto v) __attribute__((always_inline)) { put(y, v, sums[v]); });
}

}  // namespace

void convolution(const ConvolutionArgs& args, size_t begin, size_t end) {
  for_lanes(
      end - begin, [&](size_t i) { convolve(args, begin + i, kLanes); },
      [&](size_t i, size_t n) { convolve(args, begin + i, n); });
}

void delta_rule(const DeltaRuleArgs& args, size_t head, size_t begin, size_t end) {
  HeadPanel(args, head, begin, end).run();
}

void selective_scan(const SelectiveScanArgs& args, size_t head, size_t begin, size_t end) {
  const size_t first = head * args.head_dim + begin, width = end - begin, size = args.state_size;
  float* panel = panel_of(args.before, args.after, first * size, size * width);
  const size_t b = args.num_heads * args.head_dim + head / (args.num_heads / args.num_groups) * size;
  for (size_t r = 0; r < args.num_rows; ++r) {
    const float* row = args.xbc.row(r);
    const double step = softplus(args.steps.row(r)[head] + args.bias[head]);
    const ScannedToken token = {row + b, row + b + args.num_groups * size, size, kept_part(args.decay[head], step),
                                static_cast<float>(step), args.skip[head]};
    float* y = args.y.row(r) + first;
    size_t column = 0;
    for (; column + kVectors * kLanes <= width; column += kVectors * kLanes) {
      scan<kVectors>(token, row + first + column, panel + column, width, kLanes, y + column);
    }
    for (; column < width; column += kLanes) {
      const size_t n = width - column < kLanes ? width - column : kLanes;
      scan<1>(token, row + first + column, panel + column, width, n, y + column);
    }
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
