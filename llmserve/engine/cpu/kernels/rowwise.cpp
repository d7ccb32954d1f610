// Kernels that process each row by itself: embedding, normalization, activation, quantization, sums.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "rows.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

template <class T>
void embed_rows(const T* table, const int32_t* ids, size_t num_rows, size_t width, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const T* source = table + static_cast<size_t>(ids[r]) * width;
    float* target = y.row(r);
    for_lanes(
        width, [&](size_t i) { store(target + i, load(source + i)); },
        [&](size_t i, size_t n) { store_partial(target + i, load_partial(source + i, n), n); });
  }
}

constexpr size_t place_in_panel(const BFloat16*, size_t column) { return column % kLanes * 2 + column / kLanes; }
template <class T>
constexpr size_t place_in_panel(const T*, size_t column) {
  return column;
}

// Reads embeddings from the panels of a head that shares its weights with the embedding.
template <class T>
void embed_panels(const T* table, const int32_t* ids, size_t num_rows, size_t width, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const auto id = static_cast<size_t>(ids[r]);
    const T* source = table + id / kPanelColumns * kPanelColumns * width + place_in_panel(table, id % kPanelColumns);
    for (size_t i = 0; i < width; ++i) y.row(r)[i] = to_float(source[i * kPanelColumns]);
  }
}

// Reads embeddings from the panels of an 8-bit head, dequantized.
void embed_integers(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y) {
  const size_t num_groups = num_quantized_groups(args.width), panel_bytes = (args.width + 3) / 4 * 4 * kPanelColumns;
  for (size_t r = 0; r < num_rows; ++r) {
    const auto id = static_cast<size_t>(ids[r]);
    const size_t panel = id / kPanelColumns, column = id % kPanelColumns;
    const auto* values = static_cast<const uint8_t*>(args.table) + panel * panel_bytes + 4 * column;
    const Half* groups = static_cast<const Half*>(args.groups) + panel * num_groups * kPanelColumns + column;
    for (size_t i = 0; i < args.width; ++i) {
      const float scale = to_float(groups[i / kQuantizedGroup * kPanelColumns]) * args.row_scale[id];
      const int32_t value = values[i / 4 * 4 * kPanelColumns + i % 4] - kZeroPoint;
      y.row(r)[i] = static_cast<float>(value) * scale;
    }
  }
}

// The code of one column of a panel, as in `load_codes`.
template <size_t kBits>
uint32_t code_at(const uint8_t* panel, size_t column, size_t input) {
  const size_t half = column / kLanes, place = column % kLanes * 4 + input % 4;
  const uint8_t* step = panel + input / 4 * (16 * kBits);
  const auto pair = [=](const uint8_t* pairs) { return pairs[16 * half + place % 16] >> place / 16 * 2 & 3u; };
  const auto bit = [=](const uint8_t* bits) { return bits[8 * half + place / 8] >> place % 8 & 1u; };
  if (kBits == 2) return pair(step);
  if (kBits == 3) return pair(step) | bit(step + 32) << 2;
  const uint32_t low = step[place] >> 4 * half & 15;
  if (kBits == 5) return low | bit(step + 64) << 4;
  if (kBits == 6) return low | pair(step + 64) << 4;
  return low;
}

// Dequantizes a column of blocks (format.h), with the same operations as readers of GGUF files.
class BlockColumn {
 public:
  BlockColumn(Blocks blocks, const std::byte* panel, size_t column, int32_t middle)
      : blocks_(blocks), panel_(panel), column_(column), middle_(middle) {}

  float value(size_t input, uint32_t code) const {
    const std::byte* block = panel_ + input / block_inputs(blocks_) * block_bytes(blocks_);
    const float centered = static_cast<float>(static_cast<int32_t>(code) - middle_);
    const size_t group = input % block_inputs(blocks_) / kQuantizedGroup;
    switch (blocks_) {
      case Blocks::kScale:
        return half(block, 0) * centered;
      case Blocks::kScaleAndMinimum:
        return half(block, 0) * static_cast<float>(code) + half(block, 1);
      case Blocks::kScales:
        return half(block, 0) * byte<uint8_t>(block, 4 + 2 * group) * static_cast<float>(code) -
               half(block, 1) * byte<uint8_t>(block, 5 + 2 * group);
      case Blocks::kHalfScales:
        return half(block, 0) * byte<int8_t>(block, 2 + input % block_inputs(blocks_) / kHalfGroup) * centered;
      case Blocks::kHalfScalesAndMinima: {
        const auto both = static_cast<uint32_t>(byte<uint8_t>(block, 4 + input % block_inputs(blocks_) / kHalfGroup));
        return half(block, 0) * static_cast<float>(both & 15) * static_cast<float>(code) -
               half(block, 1) * static_cast<float>(both >> 4);
      }
      case Blocks::kUneven:
        return half(block, 0) * kUnevenNumbers[code];
      case Blocks::kUnevenScales:
        return half(block, 0) * byte<int8_t>(block, 2 + group) * kUnevenNumbers[code];
      case Blocks::kExponent:
        return std::ldexp(static_cast<float>(kE2M1Numbers[code]), std::max(static_cast<int>(byte<uint8_t>(block, 0)), 2) - 128);
    }
    return 0.0f;
  }

 private:
  float half(const std::byte* block, size_t index) const {
    return to_float(reinterpret_cast<const Half*>(block)[index * kPanelColumns + column_]);
  }
  template <class T>
  float byte(const std::byte* block, size_t index) const {
    return static_cast<float>(reinterpret_cast<const T*>(block)[index * kPanelColumns + column_]);
  }

  const Blocks blocks_;
  const std::byte* const panel_;
  const size_t column_;
  const int32_t middle_;
};

template <size_t kBits>
void embed_blocks(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y) {
  const size_t bytes_per_panel = block_panel_bytes(args.blocks, args.width);
  for (size_t r = 0; r < num_rows; ++r) {
    const auto id = static_cast<size_t>(ids[r]);
    const size_t panel = id / kPanelColumns, column = id % kPanelColumns;
    const auto* codes = static_cast<const uint8_t*>(args.table) + panel * args.width * (kPanelColumns * kBits / 8);
    const BlockColumn numbers(args.blocks, static_cast<const std::byte*>(args.groups) + panel * bytes_per_panel, column,
                              1 << (kBits - 1));
    for (size_t i = 0; i < args.width; ++i) {
      y.row(r)[i] = numbers.value(i, code_at<kBits>(codes, column, i)) * args.row_scale[id];
    }
  }
}

template <class T>
void embed_of(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y) {
  const auto embed_layout = args.layout == Layout::kPanels ? embed_panels<T> : embed_rows<T>;
  embed_layout(static_cast<const T*>(args.table), ids, num_rows, args.width, y);
}

void normalize(const float* x, const float* weight, float eps, size_t width, float* y) {
  F32x16 squares = zero();
  const auto add_square = [&](F32x16 v) { squares = fma(v, v, squares); };
  for_lanes(
      width, [&](size_t i) { add_square(load(x + i)); },
      [&](size_t i, size_t n) { add_square(load_partial(x + i, n)); });
  const float mean = reduce_add(squares) / static_cast<float>(width);
  const F32x16 inverse = broadcast(1.0f / __builtin_sqrtf(mean + eps));
  for_lanes(
      width, [&](size_t i) { store(y + i, load(x + i) * inverse * load(weight + i)); },
      [&](size_t i, size_t n) {
        store_partial(y + i, load_partial(x + i, n) * inverse * load_partial(weight + i, n), n);
      });
}

// Subtracts the mean first, so that large, nearly constant rows keep their precision.
void normalize_centered(const float* x, const LayerNormArgs& args, size_t begin, size_t width, float* y) {
  F32x16 sums = zero(), squares = zero();
  for_lanes(
      width, [&](size_t i) { sums = sums + load(x + i); },
      [&](size_t i, size_t n) { sums = sums + load_partial(x + i, n); });
  const F32x16 mean = broadcast(reduce_add(sums) / static_cast<float>(width));
  const auto center = [&](size_t i, size_t n) {
    store_lanes(y + i, load_lanes(x + i, n) - mean, n);
    const F32x16 centered = load_lanes(y + i, n);
    squares = fma(centered, centered, squares);
  };
  for_lanes(width, [&](size_t i) { center(i, kLanes); }, center);
  const float variance = reduce_add(squares) / static_cast<float>(width);
  const F32x16 inverse = broadcast(1.0f / __builtin_sqrtf(variance + args.eps));
  const auto scale = [&](size_t i, size_t n) {
    const F32x16 scaled = load_lanes(y + i, n) * inverse, weight = load_lanes(args.weight + begin + i, n);
    store_lanes(y + i, args.bias ? fma(scaled, weight, load_lanes(args.bias + begin + i, n)) : scaled * weight, n);
  };
  for_lanes(width, [&](size_t i) { scale(i, kLanes); }, scale);
}

struct Silu {
  F32x16 operator()(F32x16 x) const { return x / (broadcast(1.0f) + exp(zero() - x)); }
};

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + exp(-2u)).
struct GeluTanh {
  F32x16 operator()(F32x16 x) const {
    const F32x16 u = x * fma(broadcast(-0.0713548163f), x * x, broadcast(-1.59576912f));  // -2u
    return x / (broadcast(1.0f) + exp(u));
  }
};

// 0.5 x (1 + erf(x / sqrt(2))) as max(x, 0) - 0.5 |x| erfc(z), z = |x| / sqrt(2). erfc(z) exp(z^2) is a polynomial in
// t = 1 / (1 + 0.37 z), fitted over [0, 9.5] to a relative error of 2e-8.
struct Gelu {
  F32x16 operator()(F32x16 x) const {
    constexpr float kCoefficients[] = {0.06192506f, -0.30328269f, 0.48686213f, -0.28533549f, 0.31081863f,
                                       0.10651309f, 0.20625593f,  0.20742956f, 0.20881376f};
    const F32x16 size = abs(x);
    const F32x16 t = broadcast(1.0f) / fma(size, broadcast(0.26162951f), broadcast(1.0f));
    F32x16 p = broadcast(kCoefficients[0]);
    for (size_t i = 1; i < std::size(kCoefficients); ++i) p = fma(p, t, broadcast(kCoefficients[i]));
    const F32x16 tail = p * t * exp(x * x * broadcast(-0.5f));
    return max(zero(), x) - broadcast(0.5f) * size * tail;
  }
};

struct ReluSquared {
  F32x16 operator()(F32x16 x) const {
    const F32x16 positive = max(zero(), x);
    return positive * positive;
  }
};

template <class Activation>
void activate(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  const Activation made;
  for (size_t r = 0; r < num_rows; ++r) {
    const float* source = x.row(r);
    float* target = y.row(r);
    for_lanes(
        width, [&](size_t i) { store(target + i, made(load(source + i))); },
        [&](size_t i, size_t n) { store_partial(target + i, made(load_partial(source + i, n)), n); });
  }
}

// For gate and up: the product of the activation of gate and up.
template <class Activation>
struct Times {
  F32x16 operator()(F32x16 gate, F32x16 up) const { return Activation()(gate) * up; }
};

// gpt-oss's activation: x sigmoid(1.702 x) (up + 1); gate is at most 7, up is within [-7, 7].
struct Clamped {
  F32x16 operator()(F32x16 gate, F32x16 up) const {
    const F32x16 limit = broadcast(7.0f), x = min(gate, limit);
    const F32x16 bound = max(min(up, limit), zero() - limit);
    return x / (broadcast(1.0f) + exp(x * broadcast(-1.702f))) * (bound + broadcast(1.0f));
  }
};

template <class Fn>
void gated(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  const Fn made;
  for (size_t r = 0; r < num_rows; ++r) {
    const float* gate = x.row(r);
    const float* up = gate + width;
    float* target = y.row(r);
    for_lanes(
        width, [&](size_t i) { store(target + i, made(load(gate + i), load(up + i))); },
        [&](size_t i, size_t n) {
          store_partial(target + i, made(load_partial(gate + i, n), load_partial(up + i, n)), n);
        });
  }
}

// Applies fn to every element, in place.
template <class Fn>
void each(View<float> y, size_t width, size_t num_rows, Fn fn) {
  for (size_t r = 0; r < num_rows; ++r) {
    float* row = y.row(r);
    for_lanes(
        width, [&](size_t i) { store(row + i, fn(load(row + i))); },
        [&](size_t i, size_t n) { store_partial(row + i, fn(load_partial(row + i, n)), n); });
  }
}

}  // namespace

void embed(const EmbedArgs& args, const int32_t* ids, size_t num_rows, View<float> y) {
  switch (args.type) {
    case DType::kF32:
      return embed_of<float>(args, ids, num_rows, y);
    case DType::kF16:
      return embed_of<Half>(args, ids, num_rows, y);
    case DType::kBF16:
      return embed_of<BFloat16>(args, ids, num_rows, y);
    case DType::kI8:
      return embed_integers(args, ids, num_rows, y);
    case DType::kI4:
      return embed_blocks<4>(args, ids, num_rows, y);
    case DType::kI5:
      return embed_blocks<5>(args, ids, num_rows, y);
    case DType::kI6:
      return embed_blocks<6>(args, ids, num_rows, y);
    case DType::kI2:
      return embed_blocks<2>(args, ids, num_rows, y);
    case DType::kI3:
      return embed_blocks<3>(args, ids, num_rows, y);
  }
}

void rms_norm(View<const float> x, const float* weight, bool own_weights, float eps, size_t groups, size_t width,
              size_t num_rows, View<float> y) {
  const size_t group_width = width / groups;
  for (size_t r = 0; r < num_rows; ++r) {
    for (size_t g = 0; g < groups; ++g) {
      const size_t begin = g * group_width;
      normalize(x.row(r) + begin, weight + (own_weights ? begin : 0), eps, group_width, y.row(r) + begin);
    }
  }
}

void layer_norm(View<const float> x, const LayerNormArgs& args, size_t num_rows, View<float> y) {
  const size_t width = args.width / args.groups;
  for (size_t r = 0; r < num_rows; ++r) {
    for (size_t begin = 0; begin < args.width; begin += width) {
      normalize_centered(x.row(r) + begin, args, begin, width, y.row(r) + begin);
    }
  }
}

void gelu(View<const float> x, size_t width, size_t num_rows, View<float> y) { activate<Gelu>(x, width, num_rows, y); }

void gelu_tanh(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  activate<GeluTanh>(x, width, num_rows, y);
}

void relu_squared(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  activate<ReluSquared>(x, width, num_rows, y);
}

void quantize(View<const float> x, size_t width, size_t num_rows, QuantizedRows y) {
  for (size_t r = 0; r < num_rows; ++r) {
    quantize_groups(x.row(r), width, kZeroPoint, y.values.row(r), y.scales.row(r), y.offsets.row(r),
                    y.halves.data ? y.halves.row(r) : nullptr);
  }
}

void gated_silu(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  gated<Times<Silu>>(x, width, num_rows, y);
}

void gated_gelu_tanh(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  gated<Times<GeluTanh>>(x, width, num_rows, y);
}

void gated_gelu(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  gated<Times<Gelu>>(x, width, num_rows, y);
}

void gated_clamped(View<const float> x, size_t width, size_t num_rows, View<float> y) {
  gated<Clamped>(x, width, num_rows, y);
}

void rope(View<const float> x, View<const float> table, size_t rotary_dim, size_t head_dim, size_t width, size_t num_rows,
          View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    for (size_t i = 0; i < width; i += head_dim) rotate_head(x.row(r) + i, table.row(r), rotary_dim, head_dim, y.row(r) + i);
  }
}

void scale(View<float> y, float factor, size_t width, size_t num_rows) {
  each(y, width, num_rows, [&](F32x16 x) { return x * broadcast(factor); });
}

void soft_cap(View<float> y, float cap, size_t width, size_t num_rows) {
  each(y, width, num_rows, [&](F32x16 x) { return soft_capped(x, cap); });
}

void add(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    const float* left = a.row(r);
    const float* right = b.row(r);
    float* target = y.row(r);
    for (size_t i = 0; i < width; ++i) target[i] = left[i] + right[i];
  }
}

void multiply(View<const float> a, View<const float> b, size_t width, size_t num_rows, View<float> y) {
  for (size_t r = 0; r < num_rows; ++r) {
    for (size_t i = 0; i < width; ++i) y.row(r)[i] = a.row(r)[i] * b.row(r)[i];
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
