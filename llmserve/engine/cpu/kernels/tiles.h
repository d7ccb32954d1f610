// Cuts a linear layer into tiles: which rows and panels are combined, and what is prefetched meanwhile. Nothing here
// changes a result; a `LinearTactic` selects the way.
#pragma once

#include "kernels.h"
#include "tile.h"

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr size_t kVectorsPerPanel = kPanelColumns / kLanes;
inline constexpr size_t kMostSums = kFloatTactics[0].max_rows * kFloatTactics[0].vectors;  // that fit in registers
inline constexpr size_t kMostVectors = 8;  // vectors of a tile that holds all rows
inline constexpr size_t kAhead = 4096;  // bytes that such a tile fetches ahead, in all its panels together
inline constexpr size_t kCacheForRows = size_t{1} << 20;  // bytes of input rows that use a panel before the next one
inline constexpr size_t kBlockSteps = 192;  // steps of a stretch: a panel in floats and a tile's rows take under 48 KiB
inline constexpr size_t kBlockPanels = 4;  // panels that use a stretch of the depth in turn
inline constexpr size_t kSumBytes = size_t{48} << 10;  // sums of a block's rows and a panel, between stretches

// Shares the lines of [begin, begin + bytes) among tiles: one line per step, until all are fetched.
class Prefetch {
 public:
  Prefetch(const std::byte* begin, size_t bytes) : next_(begin), left_((bytes + 63) / 64) {}

  void of_next_tile(TileInput& in) {
    in.prefetch = left_ > 0 ? next_ : in.weights;  // already in a cache: this costs less than tiles without prefetches
    in.prefetch_stride = left_ > 0 ? 64 : 0;
    next_ += 64 * in.num_steps;
    left_ -= in.num_steps < left_ ? in.num_steps : left_;
  }

 private:
  const std::byte* next_;
  size_t left_;
};

// Operation: what differs between number formats.
//   Format; weights(), panel_bytes(), num_steps(), num_rows(), columns(), rows(first), row_bytes()
//   accumulate<R, V, kFirst, kFetch>(tile input, first row, first column, sums): like `multiply`, but starts from zero
//   fetch_outputs<R, V>(first row, first column); store<R, V>(first row, first column, sums)
//   kStreamVectors: the fewest vectors to read at once if one tile has all rows
//   BlockFormat, kExpandedStepBytes, block(): for blocked tactics; BlockFormat is void if there are none
template <class Operation>
class Tiles {
 public:
  explicit Tiles(const Operation& operation) : op_(operation) {}

  // Computes every row for panels [begin, end). The largest tile has kMaxRows rows and kVectors vectors.
  template <size_t kMaxRows, size_t kVectors, bool kBlocked>
  void run(size_t begin, size_t end) const {
    if (op_.num_rows() <= most_few(kMaxRows)) {
      run_few(begin, end, std::make_index_sequence<most_few(kMaxRows)>{});
    } else if constexpr (kBlocked) {
      run_blocked<kMaxRows>(begin, end);
    } else {
      run_whole<kMaxRows, kVectors>(begin, end);
    }
  }

 private:
  using Format = typename Operation::Format;
  using Sums = typename Format::Sums;
  using Tile = void (*)(const Operation&, const TileInput&, size_t row, size_t column);

  static constexpr size_t most_few(size_t max_rows) {
    return kMostSums / kVectorsPerPanel < max_rows ? kMostSums / kVectorsPerPanel : max_rows;
  }
  // The fewest rows of a tile if there are more than few rows. Rows are divided evenly, so fewer rows need no instance.
  static constexpr size_t least_rows(size_t max_rows) {
    return most_few(max_rows) < (max_rows + 1) / 2 ? most_few(max_rows) + 1 : (max_rows + 1) / 2;
  }

  // Calls fn(begin, end) for blocks of at most `most` rows, of nearly equal size.
  template <class Fn>
  void in_row_blocks(size_t most, Fn fn) const {
    const size_t rows = op_.num_rows(), blocks = (rows + most - 1) / most;
    for (size_t i = 0; i < blocks; ++i) fn(i * rows / blocks, (i + 1) * rows / blocks);
  }

  template <size_t kMaxRows, size_t kVectors>
  void run_whole(size_t begin, size_t end) const {
    constexpr size_t kPanels = kVectors > kVectorsPerPanel ? kVectors / kVectorsPerPanel : 1;
    const size_t fitting = kCacheForRows / op_.row_bytes() / kMaxRows * kMaxRows;
    in_row_blocks(fitting > 2 * kMaxRows ? fitting : 2 * kMaxRows, [&](size_t row, size_t row_end) {
      size_t panel = begin;
      for (; panel + kPanels <= end; panel += kPanels) group<kMaxRows, kVectors>(panel, row, row_end, end);
      if constexpr (kPanels > 1) {
        for (; panel < end; ++panel) group<kMaxRows, kVectorsPerPanel>(panel, row, row_end, end);
      }
    });
  }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  static void tile(const Operation& op, const TileInput& in, size_t row, size_t column) {
    if constexpr (!kFetch.own) op.template fetch_outputs<R, V>(row, column);
    Sums sums[R * V];
    op.template accumulate<R, V, kFirst, kFetch>(in, row, column, sums);
    op.template store<R, V>(row, column, sums);
  }

  static constexpr Fetch kNextPanels = {1, 1, false};  // one line per step: two tiles or more can fetch everything

  // Tile functions, indexed by rows - least_rows.
  template <size_t kMaxRows, size_t V, size_t kFirst>
  static constexpr auto tiles() {
    constexpr size_t kLeast = least_rows(kMaxRows);
    return []<size_t... I>(std::index_sequence<I...>) {
      return std::array<Tile, sizeof...(I)>{tile<kLeast + I, V, kFirst, kNextPanels>...};
    }(std::make_index_sequence<kMaxRows - kLeast + 1>{});
  }

  // Few rows: one tile reads every panel once. A tactic has nothing to choose: speed depends only on how well the
  // weights stream, which is best through many panels at once.
  template <size_t... I>
  void run_few(size_t begin, size_t end, std::index_sequence<I...>) const {
    (void)((op_.num_rows() == I + 1 && (stream<I + 1, stream_vectors(I + 1)>(begin, end), true)) || ...);
  }

  // As many vectors as have their sums in registers, and at least as many as the operation requires.
  static constexpr size_t stream_vectors(size_t rows) {
    size_t vectors = Operation::kStreamVectors;
    while (rows * vectors * 2 <= kMostSums && vectors < kMostVectors) vectors *= 2;
    return vectors;
  }

  template <size_t R, size_t V>
  void stream(size_t panel, size_t end) const {
    constexpr size_t kPanels = V / kVectorsPerPanel;
    constexpr size_t kPanelAhead = kAhead / kPanels;
    const size_t depth = op_.num_steps(), panel_bytes = op_.panel_bytes();
    const size_t last_steps = kPanelAhead / Format::kStepBytes < depth ? kPanelAhead / Format::kStepBytes : depth;
    for (; panel + kPanels <= end; panel += kPanels) {
      const std::byte* weights = op_.weights() + panel * panel_bytes;
      const std::byte* next = weights + (panel + kPanels < end ? kPanels : 1) * panel_bytes;
      const TileInput in = {op_.rows(0),           op_.row_bytes(),    weights,    panel_bytes, depth,
                            weights + kPanelAhead, Format::kStepBytes, last_steps, next};
      tile<R, V, 0, Fetch{kPanels, (Format::kStepBytes + 63) / 64, true}>(op_, in, 0, panel * kPanelColumns);
    }
    if constexpr (kPanels > 1) stream<R, V / 2>(panel, end);
  }

  // Processes a block of rows and a few panels, one stretch of the depth after another, so that the rows' part of a
  // stretch stays in a near cache.
  template <size_t kMaxRows>
  void run_blocked(size_t begin, size_t end) const {
    constexpr size_t kRows = kSumBytes / (kVectorsPerPanel * sizeof(Sums)) / kMaxRows * kMaxRows;
    in_row_blocks(kRows, [&](size_t row, size_t row_end) {
      for (size_t panel = begin; panel < end; panel += kBlockPanels) {
        block<kMaxRows>(panel, panel + kBlockPanels < end ? panel + kBlockPanels : end, row, row_end);
      }
    });
  }

  template <size_t kMaxRows>
  void block(size_t panel_begin, size_t panel_end, size_t row_begin, size_t row_end) const {
    alignas(64) std::byte sums[kBlockPanels * kSumBytes];
    const size_t depth = op_.num_steps();
    for (size_t step = 0; step < depth; step += kBlockSteps) {
      const size_t count = step + kBlockSteps < depth ? kBlockSteps : depth - step;
      for (size_t panel = panel_begin; panel < panel_end; ++panel) {
        auto* partial = reinterpret_cast<Sums*>(sums + (panel - panel_begin) * kSumBytes);
        const bool last_panel = panel + 1 == panel_end;
        const std::byte* next = stretch(last_panel ? panel_begin : panel + 1, last_panel ? step + count : step);
        stretch_of_panel<kMaxRows>({panel, step, count}, row_begin, row_end, partial, next);
      }
    }
  }

  const std::byte* stretch(size_t panel, size_t step) const {
    return op_.weights() + panel * op_.panel_bytes() + step * Format::kStepBytes;
  }

  struct Stretch {
    size_t panel, step, num_steps;
  };

  // Prefetches the data at `next` meanwhile.
  template <size_t kMaxRows>
  void stretch_of_panel(Stretch at, size_t row_begin, size_t row_end, Sums* partial, const std::byte* next) const {
    static constexpr auto kTiles = block_tiles<kMaxRows>();
    alignas(64) std::byte expanded[kBlockSteps * Operation::kExpandedStepBytes + 1];
    const size_t num_tiles = (row_end - row_begin + kMaxRows - 1) / kMaxRows;
    const bool last = at.step + at.num_steps == op_.num_steps();
    Prefetch prefetch(next, kBlockSteps * Format::kStepBytes);
    const std::byte* weights = op_.block(stretch(at.panel, at.step), at.num_steps, expanded);
    TileInput in = {nullptr, op_.row_bytes(), weights, 0, at.num_steps, nullptr, 0, 0, nullptr};
    size_t row = row_begin;
    for (size_t tiles_left = num_tiles; tiles_left > 0; --tiles_left) {
      const size_t num_rows = (row_end - row + tiles_left - 1) / tiles_left;
      in.rows = op_.rows(row) + at.step * kInputStepBytes;
      prefetch.of_next_tile(in);
      kTiles[num_rows - least_rows(kMaxRows)](op_, in, row, at.panel * kPanelColumns, {partial, at.step == 0, last});
      partial += num_rows * kVectorsPerPanel;
      row += num_rows;
    }
  }

  // Sums of a tile between stretches of the depth.
  struct Partial {
    Sums* sums;
    bool first, last;
  };
  using BlockTile = void (*)(const Operation&, const TileInput&, size_t row, size_t column, Partial partial);

  template <size_t R>
  static void block_tile(const Operation& op, const TileInput& in, size_t row, size_t column, Partial partial) {
    constexpr size_t kCount = R * kVectorsPerPanel;
    if (partial.last) op.template fetch_outputs<R, kVectorsPerPanel>(row, column);
    Sums sums[kCount];
    if (partial.first) {
      unroll<kCount>([&](auto i) __attribute__((always_inline)) { sums[i] = Format::zero(); });
    } else {
      unroll<kCount>([&](auto i) __attribute__((always_inline)) { sums[i] = partial.sums[i]; });
    }
    multiply<typename Operation::BlockFormat, R, kVectorsPerPanel, 0, kNextPanels>(in, sums);
    if (partial.last) return op.template store<R, kVectorsPerPanel>(row, column, sums);
    unroll<kCount>([&](auto i) __attribute__((always_inline)) { partial.sums[i] = sums[i]; });
  }

  template <size_t kMaxRows>
  static constexpr auto block_tiles() {
    constexpr size_t kLeast = least_rows(kMaxRows);
    return []<size_t... I>(std::index_sequence<I...>) {
      return std::array<BlockTile, sizeof...(I)>{block_tile<kLeast + I>...};
    }(std::make_index_sequence<kMaxRows - kLeast + 1>{});
  }

  // All rows of the block for one panel, for several, or for the halves of one.
  template <size_t kMaxRows, size_t V>
  void group(size_t panel, size_t row_begin, size_t row_end, size_t panel_end) const {
    static constexpr auto kTiles = tiles<kMaxRows, V, 0>();
    constexpr size_t kPanels = V > kVectorsPerPanel ? V / kVectorsPerPanel : 1;
    const size_t num_tiles = (row_end - row_begin + kMaxRows - 1) / kMaxRows;
    const std::byte* weights = op_.weights() + panel * op_.panel_bytes();
    const size_t group_bytes = kPanels * op_.panel_bytes();
    const bool has_next = panel + 2 * kPanels <= panel_end;
    Prefetch prefetch(weights + group_bytes, has_next ? group_bytes : 0);
    TileInput in = {nullptr, op_.row_bytes(), weights, op_.panel_bytes(), op_.num_steps(), nullptr, 0, 0, nullptr};
    size_t row = row_begin;
    for (size_t tiles_left = num_tiles; tiles_left > 0; --tiles_left) {
      const size_t count = (row_end - row + tiles_left - 1) / tiles_left;  // balanced: 16 rows are 8 + 8, not 12 + 4
      in.rows = op_.rows(row);
      prefetch.of_next_tile(in);
      kTiles[count - least_rows(kMaxRows)](op_, in, row, panel * kPanelColumns);
      if constexpr (V < kVectorsPerPanel) {
        static constexpr auto kSecondHalf = tiles<kMaxRows, V, 1>();
        in.prefetch = weights;
        in.prefetch_stride = 0;
        kSecondHalf[count - least_rows(kMaxRows)](op_, in, row, panel * kPanelColumns + kLanes);
      }
      row += count;
    }
  }

  const Operation& op_;
};

// Runs the tactic with this index in a variant's list.
template <const auto& kTactics, class Operation>
void run_tactic(const Operation& operation, size_t tactic, size_t begin, size_t end) {
  const Tiles<Operation> tiles(operation);
  const auto run = [&](auto i) {
    constexpr LinearTactic kTactic = kTactics[i];
    if constexpr (!kTactic.amx) tiles.template run<kTactic.max_rows, kTactic.vectors, kTactic.blocked>(begin, end);
  };
  [&]<size_t... I>(std::index_sequence<I...>) {
    (void)((tactic == I && (run(std::integral_constant<size_t, I>{}), true)) || ...);
  }(std::make_index_sequence<std::size(kTactics)>{});
}

// Number of existing columns of a vector: sixteen, fewer at the edge of the matrix, or none.
inline size_t lanes_at(size_t column, size_t columns) {
  if (column >= columns) return 0;
  return columns - column < kLanes ? columns - column : kLanes;
}

// Prefetches the lines of a tile's outputs before its sums are computed. Wide outputs of many rows fit no cache, and
// stores that wait for memory delay those of the sums that have no register.
template <size_t R, size_t V, class Args>
[[gnu::always_inline]] inline void fetch_tile(const Args& args, size_t row, size_t column) {
  unroll<R>([&](auto r) __attribute__((always_inline)) {
    const float* y = args.y.row(row + r) + column;
    unroll<V>([&](auto v) __attribute__((always_inline)) { __builtin_prefetch(y + v * kLanes, 1); });
  });
}

// y = value (+ bias) (+ residual), for a tile of R rows and V vectors. value(v, column, count) returns a function of
// the row for a vector of which `count` columns exist. Rows before `from` are not stored.
template <size_t R, size_t V, class Args, class Value>
[[gnu::always_inline]] inline void store_tile(const Args& args, size_t row, size_t column, Value value, size_t from = 0) {
  for (size_t v = 0; v < V; ++v, column += kLanes) {
    const size_t count = lanes_at(column, args.columns);
    if (count == 0) return;
    const F32x16 bias = args.bias ? load_lanes(args.bias + column, count) : zero();
    const auto value_of_row = value(v, column, count);
    for (size_t r = from; r < R; ++r) {
      F32x16 sum = value_of_row(r);
      if (args.bias) sum = sum + bias;
      if (args.residual.data) sum = sum + load_lanes(args.residual.row(row + r) + column, count);
      store_lanes(args.y.row(row + r) + column, sum, count);
    }
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
