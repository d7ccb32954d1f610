// Products of bytes with AMX: sixteen rows and sixteen outputs at once, one group of inputs at a time.
//
// A product of tiles gives a group's exact sums, as in other tactics. The format then processes them in the same order,
// so results are bitwise identical. First, weights of a stretch of a panel become signed bytes, once for all rows.
#pragma once

#include "isa.h"
#include "tiles.h"

namespace llmserve::LLMSERVE_VARIANT {

// Owns the thread's tile registers while it exists: 0 holds rows, 1 weights, 2 sums.
class TileRegisters {
 public:
  static constexpr size_t kRows = 16, kSteps = 8;

  TileRegisters() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {4 * kSteps, 64, 64};
      uint8_t rows[16] = {kRows, kSteps, kRows};
    } config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileRegisters() { asm volatile("tilerelease"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  // sums[kRows][kLanes] = the product of rows of 4 * kSteps bytes with kSteps quads of weights per output
  void multiply(const std::byte* rows, size_t row_bytes, const std::byte* weights, size_t step_bytes, int32_t* sums) const {
    asm volatile(
        "tilezero %%tmm2\n\ttileloadd (%0,%1,1), %%tmm0\n\ttileloadd (%2,%3,1), %%tmm1\n\t"
        "tdpbssd %%tmm1, %%tmm0, %%tmm2\n\ttilestored %%tmm2, (%4,%5,1)"
        :
        : "r"(rows), "r"(row_bytes), "r"(weights), "r"(step_bytes), "r"(sums), "r"(sizeof(int32_t) * kLanes)
        : "memory");
  }
};

template <class BytesFormat>
class AmxProduct {
 public:
  AmxProduct(const LinearGroupedArgs& args, const BytesFormat& format) : args_(args), format_(format) {}

  // Whether machine and shape allow it, and few rows are computed twice: 17 rows would take as long as 32.
  static bool fits(const LinearGroupedArgs& args) {
    const size_t rows = args.num_rows, twice = (kRows - rows % kRows) % kRows;
    return args.depth % kQuantizedGroup == 0 && rows >= kRows && 4 * twice <= rows && has_amx();
  }

  void run(size_t begin, size_t end) const {
    const TileRegisters registers;
    const size_t rows = args_.num_rows, blocks = (rows + kMostRows - 1) / kMostRows;
    for (size_t i = 0; i < blocks; ++i) {
      for (size_t panel = begin; panel < end; panel += kMostPanels) {
        const size_t panel_end = panel + kMostPanels < end ? panel + kMostPanels : end;
        block(registers, panel, panel_end, i * rows / blocks, (i + 1) * rows / blocks);
      }
    }
  }

 private:
  static constexpr size_t kRows = TileRegisters::kRows, kMostRows = 256, kMostTiles = kMostRows / kRows, kMostPanels = 8;
  static constexpr size_t kStepBytes = kPanelColumns * 4, kGroupSteps = kQuantizedGroup / 4;  // of expanded weights
  static constexpr size_t kMostGroups = 40;  // groups of a stretch
  using Sums = F32x16[2][kRows];  // sums of a tile of rows, for both halves of a panel
  using OfRows = float[kMostGroups][kRows];

  // Scales and offsets of a tile's rows per group of a stretch, adjacent, because both halves of a panel read them.
  struct RowFacts {
    alignas(64) OfRows scales, offsets;
  };
  struct Stretch {
    size_t first_group, groups;
    bool last;
  };
  struct RowTile {
    size_t row, first;  // rows from `row` on are new: the last tile of a block starts earlier and repeats some
  };

  // Processes one stretch of the depth after another, with sums in memory in between.
  void block(const TileRegisters& registers, size_t panel_begin, size_t panel_end, size_t begin, size_t end) const {
    alignas(64) Sums sums[kMostPanels][kMostTiles];
    RowFacts facts[kMostTiles];
    const size_t groups = args_.depth / kQuantizedGroup, tiles = (end - begin + kRows - 1) / kRows;
    const size_t stretches = (groups + kMostGroups - 1) / kMostGroups;
    for (size_t s = 0; s < stretches; ++s) {
      const size_t first_group = s * groups / stretches;
      const Stretch at = {first_group, (s + 1) * groups / stretches - first_group, s + 1 == stretches};
      const auto tile = [&](size_t i) {
        const size_t row = begin + i * kRows;
        return RowTile{row, row + kRows <= end ? row : end - kRows};
      };
      for (size_t i = 0; i < tiles; ++i) collect(at, tile(i).first, facts[i]);
      for (size_t panel = panel_begin; panel < panel_end; ++panel) {
        alignas(64) std::byte weights[kMostGroups * kGroupSteps * kStepBytes];
        expand(panel, at, weights);
        const auto* of_panel = static_cast<const std::byte*>(args_.groups) + panel * BytesFormat::panel_group_bytes(args_);
        for (size_t i = 0; i < tiles; ++i) {
          Sums& of_tile = sums[stretches > 1 ? panel - panel_begin : 0][stretches > 1 ? i : 0];
          if (at.first_group == 0) {
            for (auto& half : of_tile) unroll<kRows>([&](auto r) __attribute__((always_inline)) { half[r] = zero(); });
          }
          const Operands operands = {row_values(tile(i).first, at), weights, of_panel, at.first_group, &facts[i]};
          if (at.last) fetch_tile<kRows, 1>(args_, tile(i).first, panel * kPanelColumns);
          add<0>(registers, operands, at.groups, of_tile[0]);
          if (at.last) fetch_tile<kRows, 1>(args_, tile(i).first, panel * kPanelColumns + kLanes);
          add<1>(registers, operands, at.groups, of_tile[1]);
          if (at.last) store(panel, tile(i), of_tile);
        }
      }
    }
  }

  const std::byte* row_values(size_t row, const Stretch& at) const {
    return reinterpret_cast<const std::byte*>(args_.x.values.row(row)) + at.first_group * kQuantizedGroup;
  }

  // Collects the facts of a tile's rows for a stretch.
  void collect(const Stretch& at, size_t row, RowFacts& facts) const {
    const auto strided = [](size_t stride) {
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride)));
    };
    const __m512i of_scales = strided(args_.x.scales.stride);
    [[maybe_unused]] const __m512i of_offsets = strided(args_.x.offsets.stride);
    for (size_t i = 0; i < at.groups; ++i) {
      const size_t g = at.first_group + i;
      const F32x16 scales = {_mm512_i32gather_ps(of_scales, args_.x.scales.row(row) + g, 4)};
      LLMSERVE_VARIANT::store(facts.scales[i], scales);
      if constexpr (BytesFormat::kHasOffsets) {
        const I32x16 offsets = {_mm512_i32gather_epi32(of_offsets, args_.x.offsets.row(row) + g, 4)};
        LLMSERVE_VARIANT::store(facts.offsets[i], BytesFormat::offset(to_f32(offsets), scales));
      }
    }
  }

  // Converts weights to signed bytes.
  void expand(size_t panel, const Stretch& at, std::byte* to) const {
    const size_t first_step = panel * (args_.depth / 4) + at.first_group * kGroupSteps;
    const auto* from = reinterpret_cast<const std::byte*>(args_.weight) + first_step * BytesFormat::kStepBytes;
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(BytesFormat::kHasOffsets ? 0 : kZeroPoint));
    const BytesFormat format = format_;
    for (size_t i = 0; i < at.groups * kGroupSteps; ++i, from += BytesFormat::kStepBytes, to += kStepBytes) {
      _mm512_store_si512(to, _mm512_xor_si512(format.template load<0>(from).v, flip));
      _mm512_store_si512(to + 64, _mm512_xor_si512(format.template load<1>(from).v, flip));
    }
  }

  struct Operands {
    const std::byte *rows, *weights, *groups;  // at the beginning of the stretch; `groups`: of the panel
    size_t first_group;
    const RowFacts* facts;
  };

  // Adds the groups of a stretch to one half of a panel.
  template <size_t kHalf>
  [[gnu::noinline]] void add(const TileRegisters& registers, const Operands& in, size_t num_groups,
                             F32x16 (&sums)[kRows]) const {
    alignas(64) int32_t exact[2][kRows * kLanes];  // sums of this group and the next one
    const size_t row_bytes = args_.x.values.stride;
    const std::byte *rows = in.rows, *weights = in.weights + kHalf * 64;
    const RowFacts& facts = *in.facts;
    F32x16 local[kRows];
    unroll<kRows>([&](auto r) __attribute__((always_inline)) { local[r] = sums[r]; });
    registers.multiply(rows, row_bytes, weights, kStepBytes, exact[0]);
    for (size_t i = 0; i < num_groups; ++i) {
      rows += kQuantizedGroup;
      weights += kGroupSteps * kStepBytes;
      if (i + 1 < num_groups) registers.multiply(rows, row_bytes, weights, kStepBytes, exact[(i + 1) % 2]);
      const auto of_weights = BytesFormat::template group<kHalf>(args_, in.groups, in.first_group + i);
      const int32_t* products = exact[i % 2];
      unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        const F32x16 scale = broadcast(facts.scales[i][r]);
        const I32x16 of_row = {_mm512_load_si512(products + r * kLanes)};
        if constexpr (BytesFormat::kHasOffsets) {
          local[r] = of_weights.add(of_row, broadcast(facts.offsets[i][r]), scale, local[r]);
        } else {
          local[r] = of_weights.add(of_row, {}, scale, local[r]);
        }
      });
    }
    unroll<kRows>([&](auto r) __attribute__((always_inline)) { sums[r] = local[r]; });
  }

  void store(size_t panel, RowTile tile, const Sums& sums) const {
    store_tile<kRows, 2>(args_, tile.first, panel * kPanelColumns, [&](size_t v, size_t at, size_t count) {
      const F32x16 scale = load_lanes(args_.column_scale + at, count);
      return [=, &sums](size_t r) { return sums[v][r] * scale; };
    }, tile.row - tile.first);
  }

  const LinearGroupedArgs& args_;
  const BytesFormat format_;
};

}  // namespace llmserve::LLMSERVE_VARIANT
