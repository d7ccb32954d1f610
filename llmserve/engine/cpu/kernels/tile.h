// Products of a few rows with packed weights, kept in registers: what the linear layers of every number format share.
//
// Weights lie in panels of thirty-two outputs (`format.h`), so that one vector holds sixteen outputs and a tile of R rows
// and V vectors needs V loads and R broadcasts for its R * V multiply-adds. Each output is one chain over the depth, in
// order: tiles only choose which outputs share their loads.
//
// While a tile works on one group of panels it prefetches the next one, a share per tile, so that memory and arithmetic
// overlap: hardware prefetchers see only the first pass over a panel. Panels that only one tile reads are each prefetched a
// little ahead, and several are read at once: such a product waits for memory, and more requests are under way.
#pragma once

#include <array>
#include <utility>

#include "simd.h"

namespace llmserve::LLMSERVE_VARIANT {

// fn(0), ... fn(N - 1) with constant arguments, so that arrays indexed by them stay in registers.
template <size_t N, class Fn>
[[gnu::always_inline]] inline void unroll(Fn fn) {
  [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
    (fn(std::integral_constant<size_t, I>{}), ...);
  }(std::make_index_sequence<N>{});
}

inline constexpr size_t kInputStepBytes = 4;  // a float, or four bytes

// N places, one stride apart, walked together; four share a base, to stay within the general registers.
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

// The panels of V vectors, the first of which is half kFirst of its panel.
template <size_t V, size_t kFirst>
inline constexpr size_t kPanelsOf = (kFirst + V + 1) / 2;

// What a tile prefetches in each step: `lines` of so many streams that lie as far apart as panels do.
struct Fetch {
  size_t streams, lines;
  bool own;  // its own panels, a little ahead, into the nearest cache; their ends fetch the beginnings of the next ones
};

struct TileInput {
  const std::byte* rows;
  size_t row_bytes;          // from one row to the next
  const std::byte* weights;  // of the first panel
  size_t panel_bytes;
  size_t num_steps;
  const std::byte* prefetch;       // what will be needed next
  size_t prefetch_stride;          // bytes from what a step fetches to what the next one does; 0: nothing is wanted
  size_t last_steps;               // of Fetch::own: so many at the end
  const std::byte* last_prefetch;  // fetch from here
};

// Walks the streams of a Fetch.
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

// Adds to `sums`. Format: kStepBytes of a panel, Weights, Input, Sums, and the functions used here. kFirst: which half of
// the panel the first vector is.
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
