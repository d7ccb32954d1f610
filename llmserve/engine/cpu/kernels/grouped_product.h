// y = x @ weight.T for weights of eight bits or fewer and int8 activations; thirty-two inputs share a scale in both.
//
// Sums within a group are exact. Groups are added in order: the exact sum times the input's scale, then one fused
// multiply-add of that with the weight's scale.
#pragma once

#include "tiles.h"
#if defined(LLMSERVE_USE_AVX512)
#include "amx_product.h"
#endif

namespace llmserve::LLMSERVE_VARIANT {

// Shared by formats of byte weights with a zero point of kZeroPoint: sums begin with its correction.
struct ByteProducts {
  static constexpr bool kHasOffsets = false;
  using Input = ByteInput;
  using Sums = ByteSums;
  static Sums start(int32_t offset) { return start_bytes(offset); }
  static Input broadcast(const std::byte* p) { return broadcast_for_bytes(reinterpret_cast<const int8_t*>(p)); }

  struct Nothing {};  // no offset is left
  static Nothing offset(F32x16, F32x16) { return {}; }
  struct Group {
    F32x16 scale;
    F32x16 add(I32x16 exact, Nothing, F32x16 input_scale, F32x16 local) const {
      return fma(to_f32(exact) * input_scale, scale, local);
    }
  };
};

// Shared by formats with non-negative weights of kBits bits, of which kInputs share a scale.
template <size_t kBits, size_t kInputs>
struct NibbleProducts {
  static constexpr bool kHasOffsets = true;  // sums have offsets, for the zero points of codes
  static constexpr bool kIsShort = kInputs / 2 * ((1u << kBits) - 1) * 127 < 1u << 15;
  using Input = NibbleInput;
  using Sums = std::conditional_t<kIsShort, ShortSums, NibbleSums>;
  static Sums start(int32_t) { return Sums{start_nibbles()}; }
  static Input broadcast(const std::byte* p) { return broadcast_for_nibbles(reinterpret_cast<const int8_t*>(p)); }
};

// BytesFormat: how a step of weights is loaded, multiplied and summed (Weights, Input, Sums, kStepBytes, and the
// functions used here), and the data that a group of kGroup inputs has for each output. `group` returns this data for
// one vector of a panel, as an object that adds exact sums to the previous sums.
template <class BytesFormat>
class GroupedProduct {
 public:
  struct Format {  // for the tiles: sums are floats
    using Sums = F32x16;
    static constexpr size_t kStepBytes = BytesFormat::kStepBytes;
  };
  static constexpr size_t kStreamVectors = 2 * kVectorsPerPanel;
  using BlockFormat = void;  // sums that restart with every group do not profit from blocks

  explicit GroupedProduct(const LinearGroupedArgs& args, BytesFormat format = {}) : args_(args), format_(format) {}

  const std::byte* weights() const { return reinterpret_cast<const std::byte*>(args_.weight); }
  size_t panel_bytes() const { return num_steps() * Format::kStepBytes; }
  size_t num_steps() const { return (args_.depth + 3) / 4; }
  size_t num_rows() const { return args_.num_rows; }
  const std::byte* rows(size_t first) const { return reinterpret_cast<const std::byte*>(args_.x.values.row(first)); }
  size_t row_bytes() const { return args_.x.values.stride; }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] void accumulate(const TileInput& in, size_t row, size_t column,
                                         F32x16 (&sums)[R * V]) const {
    const size_t num_groups = (args_.depth + BytesFormat::kGroup - 1) / BytesFormat::kGroup;
    const size_t bytes_per_panel = BytesFormat::panel_group_bytes(args_);
    const std::byte* groups = static_cast<const std::byte*>(args_.groups) + column / kPanelColumns * bytes_per_panel;
    TileInput group = in;
    F32x16 local[R * V];
    unroll<R * V>([&](auto i) __attribute__((always_inline)) { local[i] = broadcast(0.0f); });
    for (size_t g = 0; g < num_groups; ++g) {
      const size_t left = in.num_steps - g * kGroupSteps;
      group.num_steps = left < kGroupSteps ? left : kGroupSteps;
      group.prefetch = prefetch_at<kFetch>(in, g * kGroupSteps);
      // Vectors whose exact sums are in registers together; a tile that fetches its own panels may take them in turn.
      constexpr bool kCut = kFetch.own && R * V > kMostSums && V > kVectorsPerPanel;
      constexpr size_t kCount = kCut ? kVectorsPerPanel : V;
      unroll<V / kCount>([&](auto part) __attribute__((always_inline)) {
        add_part<R, V, part * kCount, kCount, kFirst, kFetch>(group, groups, row, g, local);
      });
      group.rows += BytesFormat::kGroup;
      group.weights += kGroupSteps * Format::kStepBytes;
    }
    unroll<R * V>([&](auto i) __attribute__((always_inline)) { sums[i] = local[i]; });
  }

  template <size_t R, size_t V>
  void fetch_outputs(size_t row, size_t column) const { fetch_tile<R, V>(args_, row, column); }

  template <size_t R, size_t V>
  void store(size_t row, size_t column, const F32x16 (&sums)[R * V]) const {
    store_tile<R, V>(args_, row, column, [&](size_t v, size_t at, size_t count) {
      const F32x16 scale = load_lanes(args_.column_scale + at, count);
      return [=, &sums](size_t r) { return sums[r * V + v] * scale; };
    });
  }

 private:
  using Exact = typename BytesFormat::Sums;
  static constexpr size_t kGroupSteps = BytesFormat::kGroup / 4;

  // Adds a group of inputs to a tile's vectors [kBegin, kBegin + kCount).
  template <size_t R, size_t V, size_t kBegin, size_t kCount, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] void add_part(TileInput group, const std::byte* groups, size_t row, size_t g,
                                       F32x16 (&local)[R * V]) const {
    constexpr size_t kPanel = kBegin / kVectorsPerPanel;
    constexpr Fetch kOfPart = {kCount == V ? kFetch.streams : 1, kFetch.lines, kFetch.own};
    const size_t bytes_per_panel = BytesFormat::panel_group_bytes(args_);
    group.weights += kPanel * group.panel_bytes;
    group.prefetch += kPanel * group.panel_bytes;
    groups += kPanel * bytes_per_panel;
    Exact exact[R * kCount];
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const Exact start = BytesFormat::start(offset_at(row + r, g));
      unroll<kCount>([&](auto v) __attribute__((always_inline)) { exact[r * kCount + v] = start; });
    });
    add_group<R, kCount, kFirst, kOfPart>(group, exact);
    typename BytesFormat::Group of_weights[kCount];
    unroll<kCount>([&](auto v) __attribute__((always_inline)) {
      of_weights[v] = BytesFormat::template group<(kFirst + v) % 2>(args_, groups + (kFirst + v) / 2 * bytes_per_panel, g);
    });
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const F32x16 input_scale = broadcast(args_.x.scales.row(row + r)[g * BytesFormat::kGroup / kQuantizedGroup]);
      const auto offset = BytesFormat::offset(broadcast(static_cast<float>(offset_at(row + r, g))), input_scale);
      unroll<kCount>([&](auto v) __attribute__((always_inline)) {
        F32x16& sum = local[r * V + kBegin + v];
        sum = of_weights[v].add(total(exact[r * kCount + v]), offset, input_scale, sum);
      });
    });
  }

  int32_t offset_at(size_t row, size_t group) const {
    if constexpr (BytesFormat::kGroup == kQuantizedGroup) return args_.x.offsets.row(row)[group];
    const int32_t first = args_.x.halves.row(row)[group / 2];
    return group % 2 == 0 ? first : args_.x.offsets.row(row)[group / 2] - first;
  }

  // Address that a group prefetches from, if it begins with this step.
  template <Fetch kFetch>
  [[gnu::always_inline]] static const std::byte* prefetch_at(const TileInput& in, size_t step) {
    const size_t first_steps = in.num_steps - (kFetch.own ? in.last_steps : 0);
    if (!kFetch.own || step < first_steps) return in.prefetch + in.prefetch_stride * step;
    return in.last_prefetch + in.prefetch_stride * (step - first_steps);
  }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] void add_group(const TileInput& in, Exact (&exact)[R * V]) const {
    Cursor<R> rows(in.rows, in.row_bytes);
    Cursor<kPanelsOf<V, kFirst>> panels(in.weights, in.panel_bytes);
    Prefetcher<kFetch> prefetcher(in.prefetch, in);
    const BytesFormat format = format_;  // a copy, so that the compiler knows that it does not alias rows or weights
    for (size_t step = in.num_steps; step > 0; --step) {
      prefetcher.step();
      typename BytesFormat::Weights weights[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        weights[v] = format.template load<(kFirst + v) % 2>(panels.at((kFirst + v) / 2));
      });
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        const typename BytesFormat::Input x = BytesFormat::broadcast(rows.at(r));
        unroll<V>([&](auto v) __attribute__((always_inline)) { add_products(exact[r * V + v], x, weights[v]); });
      });
      rows.advance(kInputStepBytes);
      panels.advance(Format::kStepBytes);
    }
  }

  const LinearGroupedArgs& args_;
  const BytesFormat format_;
};

// Runs the tactic with AMX if it is the chosen one and fits. Returns whether it did.
template <class BytesFormat>
bool run_amx([[maybe_unused]] const LinearTactic& tactic, [[maybe_unused]] const LinearGroupedArgs& args,
             [[maybe_unused]] size_t begin, [[maybe_unused]] size_t end, [[maybe_unused]] const BytesFormat& format) {
#if defined(LLMSERVE_USE_AVX512)
  if constexpr (BytesFormat::kGroup == kQuantizedGroup) {
    if (!tactic.amx || !AmxProduct<BytesFormat>::fits(args)) return false;
    AmxProduct<BytesFormat>(args, format).run(begin, end);
    return true;
  }
#endif
  return false;
}

// Runs the tactic with this index in a variant's list.
template <const auto& kTactics, class BytesFormat>
void run_grouped(const LinearGroupedArgs& args, size_t tactic, size_t begin, size_t end) {
  if (run_amx(kTactics[tactic], args, begin, end, BytesFormat())) return;
  run_tactic<kTactics>(GroupedProduct<BytesFormat>(args), kTactics[tactic].amx ? 1 : tactic, begin, end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
