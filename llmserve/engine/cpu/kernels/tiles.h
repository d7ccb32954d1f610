// Cuts a linear layer into tiles: which rows and panels go together, and what is prefetched meanwhile. Nothing here
// changes a result; `LinearTactic` chooses.
#pragma once

#include "kernels.h"
#include "tile.h"

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr size_t kVectorsPerPanel = kPanelColumns / kLanes;
inline constexpr size_t kCacheForRows = size_t{1} << 20;  // bytes of input that pass over a panel together

// Shares out the lines of [begin, begin + bytes) among tiles: the same number per step of a tile, until all are fetched.
class Prefetch {
 public:
  Prefetch(const std::byte* begin, size_t bytes, size_t num_steps, size_t num_tiles)
      : next_(begin), left_((bytes + 63) / 64), num_steps_(num_steps) {
    const size_t per_step = (left_ + num_steps * num_tiles - 1) / (num_steps * num_tiles);
    choice_ = per_step <= 2 ? per_step : 3;
  }

  // Which of [0, 1, 2, 4] lines per step the next tile fetches, and from where.
  size_t next(const std::byte** from) {
    const size_t lines = (choice_ == 3 ? 4 : choice_) * num_steps_;
    *from = next_;
    if (left_ == 0) return 0;
    next_ += 64 * lines;
    left_ -= lines < left_ ? lines : left_;
    return choice_;
  }

 private:
  const std::byte* next_;
  size_t left_, num_steps_, choice_;
};

// Operation: what differs between number formats.
//   Format; weights(), panel_bytes(), num_steps(), num_rows(), columns(), rows(first), row_bytes()
//   accumulate<R, V, kFirst, kLines>(tile input, first row, first column, sums); as `multiply`
//   store<R, V>(first row, first column, sums)
template <class Operation>
class Tiles {
 public:
  explicit Tiles(const Operation& operation) : op_(operation) {}

  // Every row over panels [begin, end). kMaxRows rows and kVectors vectors of sixteen outputs are the largest tile.
  template <size_t kMaxRows, size_t kVectors>
  void run(size_t begin, size_t end) const {
    constexpr size_t kPanels = kVectors > kVectorsPerPanel ? kVectors / kVectorsPerPanel : 1;
    const size_t block = row_block<kMaxRows>();
    for (size_t row = 0; row < op_.num_rows(); row += block) {
      const size_t row_end = row + block < op_.num_rows() ? row + block : op_.num_rows();
      size_t panel = begin;
      for (; panel + kPanels <= end; panel += kPanels) group<kMaxRows, kVectors>(panel, row, row_end, end);
      if constexpr (kPanels > 1) {
        for (; panel < end; ++panel) group<kMaxRows, kVectorsPerPanel>(panel, row, row_end, end);
      }
    }
  }

 private:
  using Format = typename Operation::Format;
  using Tile = void (*)(const Operation&, const TileInput&, size_t row, size_t column);

  template <size_t R, size_t V, size_t kFirst, size_t kLines>
  static void tile(const Operation& op, const TileInput& in, size_t row, size_t column) {
    typename Format::Sums sums[R * V];
    op.template accumulate<R, V, kFirst, kLines>(in, row, column, sums);
    op.template store<R, V>(row, column, sums);
  }

  // [rows - 1][lines prefetched per step: 0, 1, 2 or 4]
  template <size_t kMaxRows, size_t V, size_t kFirst>
  static constexpr auto tiles() {
    return []<size_t... I>(std::index_sequence<I...>) {
      return std::array<std::array<Tile, 4>, kMaxRows>{
          {{tile<I + 1, V, kFirst, 0>, tile<I + 1, V, kFirst, 1>, tile<I + 1, V, kFirst, 2>, tile<I + 1, V, kFirst, 4>}...}};
    }(std::make_index_sequence<kMaxRows>{});
  }

  template <size_t kMaxRows>
  size_t row_block() const {
    const size_t fitting = kCacheForRows / op_.row_bytes() / kMaxRows * kMaxRows;
    return fitting > 2 * kMaxRows ? fitting : 2 * kMaxRows;
  }

  // All rows of the block over one panel, or over several, or over the halves of one.
  template <size_t kMaxRows, size_t V>
  void group(size_t panel, size_t row_begin, size_t row_end, size_t panel_end) const {
    static constexpr auto kTiles = tiles<kMaxRows, V, 0>();
    constexpr size_t kPanels = V > kVectorsPerPanel ? V / kVectorsPerPanel : 1;
    const size_t num_tiles = (row_end - row_begin + kMaxRows - 1) / kMaxRows;
    const std::byte* weights = op_.weights() + panel * op_.panel_bytes();
    const size_t group_bytes = kPanels * op_.panel_bytes();
    const bool has_next = panel + 2 * kPanels <= panel_end;
    Prefetch prefetch(weights + group_bytes, has_next ? group_bytes : 0, op_.num_steps(), num_tiles);
    TileInput in = {nullptr, op_.row_bytes(), weights, op_.panel_bytes(), op_.num_steps(), nullptr};
    size_t row = row_begin;
    for (size_t tiles_left = num_tiles; tiles_left > 0; --tiles_left) {
      const size_t count = (row_end - row + tiles_left - 1) / tiles_left;  // balanced: 16 rows are 8 + 8, not 12 + 4
      in.rows = op_.rows(row);
      const size_t choice = prefetch.next(&in.prefetch);
      kTiles[count - 1][choice](op_, in, row, panel * kPanelColumns);
      if constexpr (V < kVectorsPerPanel) {
        static constexpr auto kSecondHalf = tiles<kMaxRows, V, 1>();
        kSecondHalf[count - 1][0](op_, in, row, panel * kPanelColumns + kLanes);
      }
      row += count;
    }
  }

  const Operation& op_;
};

// The tactic by number, out of a variant's list.
template <const auto& kTactics, class Operation>
void run_tactic(const Operation& operation, size_t tactic, size_t begin, size_t end) {
  const Tiles<Operation> tiles(operation);
  [&]<size_t... I>(std::index_sequence<I...>) {
    (void)((tactic == I && (tiles.template run<kTactics[I].max_rows, kTactics[I].vectors>(begin, end), true)) || ...);
  }(std::make_index_sequence<std::size(kTactics)>{});
}

// The columns of a vector that exist: sixteen, fewer at the edge of the matrix, or none.
inline size_t lanes_at(size_t column, size_t columns) {
  if (column >= columns) return 0;
  return columns - column < kLanes ? columns - column : kLanes;
}

}  // namespace llmserve::LLMSERVE_VARIANT
