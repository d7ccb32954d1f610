// Products of a few rows with packed weights, kept in registers: what the linear layers of every number format share.
//
// Weights lie in panels of thirty-two outputs (`format.h`), so that one vector holds sixteen outputs and a tile of R rows
// and V vectors needs V loads and R broadcasts for its R * V multiply-adds. Each output is one chain over the depth, in
// order: tiles only choose which outputs share their loads.
//
// While a tile works on one group of panels it prefetches the next one, a share per tile, so that memory and arithmetic
// overlap: hardware prefetchers see only the first pass over a panel. A panel that only one tile reads is prefetched a page
// ahead, where those prefetchers stop.
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

// R rows walked together; four share a base, to stay within the general registers.
template <size_t R>
class RowCursor {
 public:
  [[gnu::always_inline]] RowCursor(const std::byte* first, size_t stride) : stride_(stride), stride3_(3 * stride) {
    unroll<kBases>([&](auto i) __attribute__((always_inline)) { bases_[i] = first + 4 * i * stride; });
  }
  [[gnu::always_inline]] const std::byte* row(size_t r) const {
    const std::byte* base = bases_[r / 4];
    return r % 4 == 3 ? base + stride3_ : base + r % 4 * stride_;
  }
  [[gnu::always_inline]] void advance() {
    unroll<kBases>([&](auto i) __attribute__((always_inline)) { bases_[i] += kInputStepBytes; });
  }

 private:
  static constexpr size_t kBases = (R + 3) / 4;
  const std::byte* bases_[kBases];
  size_t stride_, stride3_;
};

struct TileInput {
  const std::byte* rows;
  size_t row_bytes;          // from one row to the next
  const std::byte* weights;  // of the first panel
  size_t panel_bytes;
  size_t num_steps;
  const std::byte* prefetch;  // what will be needed next
};

// Adds to `sums`. Format: kStepBytes of a panel, Weights, Input, Sums, and the functions used here. kFirst: which half of
// the panel the first vector is. kLines: cache lines prefetched per step.
template <class Format, size_t R, size_t V, size_t kFirst, size_t kLines>
[[gnu::always_inline]] inline void multiply(const TileInput& in, typename Format::Sums (&sums)[R * V]) {
  typename Format::Sums local[R * V];  // registers: `sums` is memory
  unroll<R * V>([&](auto i) __attribute__((always_inline)) { local[i] = sums[i]; });
  RowCursor<R> rows(in.rows, in.row_bytes);
  const std::byte* first = in.weights;
  const std::byte* second = in.weights + in.panel_bytes;
  const std::byte* prefetch = in.prefetch;
  for (size_t step = in.num_steps; step > 0; --step) {
    unroll<kLines>([&](auto i) __attribute__((always_inline)) { __builtin_prefetch(prefetch + 64 * i, 0, 2); });
    prefetch += 64 * kLines;
    typename Format::Weights weights[V];
    unroll<V>([&](auto v) __attribute__((always_inline)) {
      weights[v] = Format::template load<(kFirst + v) % 2>(v < 2 ? first : second);
    });
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const typename Format::Input x = Format::broadcast(rows.row(r));
      unroll<V>([&](auto v) __attribute__((always_inline)) { Format::add(local[r * V + v], x, weights[v]); });
    });
    rows.advance();
    first += Format::kStepBytes;
    second += Format::kStepBytes;
  }
  unroll<R * V>([&](auto i) __attribute__((always_inline)) { sums[i] = local[i]; });
}

}  // namespace llmserve::LLMSERVE_VARIANT
