// y = x @ weight.T for four-bit weights with a scale per group of inputs, and int8 activations.
//
// Within a group sums are exact integers; groups are added in order, one fused multiply-add each.
#include "tiles.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

struct Int4Format {
  using Sums = F32x16;
  static constexpr size_t kStepBytes = kPanelColumns * 4 / 2;
};

class Int4Product {
 public:
  using Format = Int4Format;
  using BlockFormat = void;  // sums that begin anew with every group have no use for blocks

  explicit Int4Product(const LinearInt4Args& args)
      : args_(args), num_groups_((args.depth + args.group_size - 1) / args.group_size) {}

  const std::byte* weights() const { return reinterpret_cast<const std::byte*>(args_.weight); }
  size_t panel_bytes() const { return num_steps() * Format::kStepBytes; }
  size_t num_steps() const { return (args_.depth + 3) / 4; }
  size_t num_rows() const { return args_.num_rows; }
  const std::byte* rows(size_t first) const { return reinterpret_cast<const std::byte*>(args_.x.row(first)); }
  size_t row_bytes() const { return args_.x.stride; }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] void accumulate(const TileInput& in, size_t row, size_t column,
                                         F32x16 (&sums)[R * V]) const {
    const size_t group_steps = args_.group_size / 4;
    const Half* scales = static_cast<const Half*>(args_.weight_scale) + column / kPanelColumns * scales_per_panel();
    TileInput group = in;
    F32x16 local[R * V];
    unroll<R * V>([&](auto i) __attribute__((always_inline)) { local[i] = broadcast(0.0f); });
    for (size_t g = 0; g < num_groups_; ++g, scales += kPanelColumns) {
      const size_t left = in.num_steps - g * group_steps;
      group.num_steps = left < group_steps ? left : group_steps;
      I32x16 exact[R * V];
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        const I32x16 start = broadcast_i32(args_.x_sums.row(row + r)[g]);
        unroll<V>([&](auto v) __attribute__((always_inline)) { exact[r * V + v] = start; });
      });
      group.prefetch = prefetch_at<kFetch>(in, g * group_steps);
      add_group<R, V, kFirst, kFetch>(group, exact);
      F32x16 scale[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        scale[v] = load(scales + (kFirst + v) / 2 * scales_per_panel() + (kFirst + v) % 2 * kLanes);
      });
      unroll<R * V>([&](auto i) __attribute__((always_inline)) {
        local[i] = fma(to_f32(exact[i]), scale[i % V], local[i]);
      });
      group.rows += args_.group_size;
      group.weights += group_steps * Format::kStepBytes;
    }
    unroll<R * V>([&](auto i) __attribute__((always_inline)) { sums[i] = local[i]; });
  }

  template <size_t R, size_t V>
  void store(size_t row, size_t column, const F32x16 (&sums)[R * V]) const {
    store_tile<R, V>(args_, row, column, [&](size_t v, size_t, size_t) {
      return [&, v](size_t r) { return sums[r * V + v] * broadcast(*args_.x_scale.row(row + r)); };
    });
  }

 private:
  size_t scales_per_panel() const { return num_groups_ * kPanelColumns; }

  // What a group that begins with this step prefetches.
  template <Fetch kFetch>
  [[gnu::always_inline]] static const std::byte* prefetch_at(const TileInput& in, size_t step) {
    const size_t first_steps = in.num_steps - (kFetch.own ? in.last_steps : 0);
    if (!kFetch.own || step < first_steps) return in.prefetch + 64 * kFetch.lines * step;
    return in.last_prefetch + 64 * kFetch.lines * (step - first_steps);
  }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] static void add_group(const TileInput& in, I32x16 (&exact)[R * V]) {
    Cursor<R> rows(in.rows, in.row_bytes);
    Cursor<kPanelsOf<V, kFirst>> panels(in.weights, in.panel_bytes);
    Prefetcher<kFetch> prefetcher(in.prefetch, in.panel_bytes);
    for (size_t step = in.num_steps; step > 0; --step) {
      prefetcher.step();
      decltype(load_nibbles<0>(static_cast<const uint8_t*>(nullptr))) weights[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        const auto* place = reinterpret_cast<const uint8_t*>(panels.at((kFirst + v) / 2));
        weights[v] = load_nibbles<(kFirst + v) % 2>(place);
      });
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        const NibbleInput x = broadcast_quad(reinterpret_cast<const int8_t*>(rows.at(r)));
        unroll<V>([&](auto v) __attribute__((always_inline)) {
          add_nibble_products(exact[r * V + v], x, weights[v]);
        });
      });
      rows.advance(kInputStepBytes);
      panels.advance(Format::kStepBytes);
    }
  }

  const LinearInt4Args& args_;
  size_t num_groups_;
};

}  // namespace

void linear_int4(const LinearInt4Args& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_tactic<kInt4Tactics>(Int4Product(args), tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
