// Products of a few rows with packed weights, kept in registers: shared by the linear layers of all number formats.
//
// Weights are in panels of thirty-two outputs (`format.h`), so that one vector holds sixteen outputs. A tile of R rows
// and V vectors needs V loads and R broadcasts for its R * V multiply-adds. Each output is one sum over the depth, in
// order: tiles only determine which outputs share their loads.
//
// While a tile works on one group of panels, it prefetches a share of the next one, so that memory and arithmetic
// overlap: hardware prefetchers see only the first pass over a panel. Panels that only one tile reads are prefetched a
// little ahead, and several are read at once: such a product waits for memory, and this keeps more requests in flight.
#pragma once

#include <array>
#include <utility>

#include "simd.h"

namespace llmserve::LLMSERVE_VARIANT {

// Calls fn(0), ... fn(N - 1) with constant arguments, so that arrays indexed by them stay in registers.
template <size_t N, class Fn>
[[gnu::always_inline]] inline void unroll(Fn fn) {
  [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
    (fn(std::integral_constant<size_t, I>{}), ...);
  }(std::make_index_sequence<N>{});
}

inline constexpr size_t kInputStepBytes = 4;  // a float, or four bytes

// N addresses, one stride apart, that advance together. Four share a base, so that general registers suffice.
template <size_t N>
class Cursor {
 public:
  [[gnu::always_inline]] Cursor(const std::byte* first, size_t stride) : stride_(stride), stride3_(3 * stride) {
    unroll<kBases>([&](auto i) __attribute__((always_inline)) { bases_[i] = first + 4 * i * stride; });
  }
  [[gnu::always_inline]] const std::byte* at(size_t n) const {
    const std::byte* base = bases_[n / 4];
    return n % 4 == 3 ? base + stride3_ : base + n % 4 * stride_;
  }
  [[gnu::always_inline]] void advance(size_t bytes) {
    unroll<kBases>([&](auto i) __attribute__((always_inline)) { bases_[i] += bytes; });
  }

 private:
  static constexpr size_t kBases = (N + 3) / 4;
  const std::byte* bases_[kBases];
  size_t stride_, stride3_;
};

// Number of panels that V vectors span if the first vector is half kFirst of its panel.
template <size_t V, size_t kFirst>
inline constexpr size_t kPanelsOf = (kFirst + V + 1) / 2;

// What a tile prefetches in each step: `lines` cache lines of each of `streams` streams, one panel apart.
struct Fetch {
  size_t streams, lines;
  bool own;  // its own panels, a little ahead, into the nearest cache; at their ends, the beginnings of the next ones
};

struct TileInput {
  const std::byte* rows;
  size_t row_bytes;          // bytes from one row to the next
  const std::byte* weights;  // the first panel
  size_t panel_bytes;
  size_t num_steps;
  const std::byte* prefetch;       // data that will be needed next
  size_t prefetch_stride;          // bytes between the fetches of successive steps; 0: nothing to fetch
  size_t last_steps;               // with Fetch::own: final steps, which fetch from last_prefetch
  const std::byte* last_prefetch;  // the beginning of the next panels
};

// Advances through the streams of a Fetch and prefetches them.
template <Fetch kFetch>
class Prefetcher {
 public:
  [[gnu::always_inline]] Prefetcher(const std::byte* first, const TileInput& in)
      : streams_(first, in.panel_bytes), stride_(in.prefetch_stride) {}
  [[gnu::always_inline]] void step() {
    unroll<kFetch.streams>([&](auto s) __attribute__((always_inline)) {
      unroll<kFetch.lines>([&](auto i) __attribute__((always_inline)) {
        __builtin_prefetch(streams_.at(s) + 64 * i, 0, kFetch.own ? 3 : 2);
      });
    });
    streams_.advance(stride_);
  }

 private:
  Cursor<kFetch.streams> streams_;
  size_t stride_;
};

// Adds products to `sums`. Format: Weights, Input, Sums, kStepBytes of a panel, and the functions used here. kFirst:
// the half of its panel that the first vector is.
template <class Format, size_t R, size_t V, size_t kFirst, Fetch kFetch>
[[gnu::always_inline]] inline void multiply(const TileInput& in, typename Format::Sums (&sums)[R * V]) {
  typename Format::Sums local[R * V];  // registers: `sums` is memory
  unroll<R * V>([&](auto i) __attribute__((always_inline)) { local[i] = sums[i]; });
  Cursor<R> rows(in.rows, in.row_bytes);
  Cursor<kPanelsOf<V, kFirst>> panels(in.weights, in.panel_bytes);
  for (size_t part = kFetch.own ? 2 : 1; part > 0; --part) {
    const bool last = kFetch.own && part == 1;
    Prefetcher<kFetch> prefetcher(last ? in.last_prefetch : in.prefetch, in);
    for (size_t step = last ? in.last_steps : in.num_steps - (kFetch.own ? in.last_steps : 0); step > 0; --step) {
      prefetcher.step();
      typename Format::Weights weights[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        weights[v] = Format::template load<(kFirst + v) % 2>(panels.at((kFirst + v) / 2));
      });
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        const typename Format::Input x = Format::broadcast(rows.at(r));
        unroll<V>([&](auto v) __attribute__((always_inline)) { Format::add(local[r * V + v], x, weights[v]); });
      });
      rows.advance(kInputStepBytes);
      panels.advance(Format::kStepBytes);
    }
  }
  unroll<R * V>([&](auto i) __attribute__((always_inline)) { sums[i] = local[i]; });
}

}  // namespace llmserve::LLMSERVE_VARIANT
