// LoRA adapters of an opened engine: thin matrices that a step adds to the outputs of linear layers, for the rows of the
// chunks that name them.
//
// Order of one output: the layer's own result, bias and residual included; then for each of its adapter's parts one chain
// over the ranks. The inner numbers are chains over the inputs, as in every float linear layer: no bit depends on the other
// rows of the step.
//
// An adapter has no loop of its own. The loop of a layer begins with the inner numbers of its adapters, and whoever has
// computed some of its panels adds to them what adapters make of the inner numbers: by then they are there.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine_file.h"
#include "error.h"
#include "kernels.h"
#include "memory.h"
#include "step.h"

namespace llmserve {

inline constexpr uint32_t kMaxAdapterSlots = 4096;
inline constexpr uint32_t kMaxAdapterRank = 256;
inline constexpr uint32_t kMaxAdapterRanks = 16 * kMaxAdapterRank;  // of an operation's parts

// y[first_column ... + columns) += inner[first_rank ... + rank) @ up.T, of the output of one operation, whose inner numbers
// are x @ down.T: the parts of an operation share one `down`. Who loads an adapter keeps the matrices until it is unloaded.
struct AdapterPartRecord {
  const void* down;  // [num_ranks, depth] in panels
  const void* up;    // [columns, rank] in panels
  uint32_t op;       // its number in the file
  uint32_t dtype;    // of both: kF32, kF16, kBF16
  uint32_t first_column;  // where a panel of the operation begins
  uint32_t columns;
  uint32_t depth;
  uint32_t rank;
  uint32_t first_rank;
  uint32_t num_ranks;  // of all parts of the operation
};
static_assert(sizeof(AdapterPartRecord) == 48);

struct Adapter {
  std::vector<AdapterPartRecord> parts;  // by operation
  std::vector<uint32_t> begins;          // of each operation's parts; one more at the end

  std::span<const AdapterPartRecord> of(size_t op) const {
    return std::span(parts).subspan(begins[op], begins[op + 1] - begins[op]);
  }
};

// Rows of a step, one after the other, with one adapter.
struct AdapterRows {
  const Adapter* adapter;
  uint32_t begin;
  uint32_t count;
};

class Adapters {
 public:
  // Puts an adapter into a free slot, counted from 1. Not during a step.
  Error load(const EngineFile& file, uint32_t slot, std::span<const AdapterPartRecord> parts);
  Error unload(uint32_t slot);

  Error check(const StepRecord& step) const;
  // Cuts the rows of a step that have adapters into pieces.
  void prepare(const StepRecord& step);

  std::span<const AdapterRows> rows() const { return rows_; }
  View<float> inner() const { return {reinterpret_cast<float*>(inner_.data()), inner_width_}; }
  View<float> inputs() const { return {reinterpret_cast<float*>(inputs_.data()), inputs_width_}; }

 private:
  const Adapter* find(uint32_t slot) const {
    return slot - 1 < slots_.size() ? slots_[slot - 1].get() : nullptr;
  }
  Error grow(const EngineFile& file, const Adapter& adapter);

  std::vector<std::unique_ptr<Adapter>> slots_;
  std::vector<AdapterRows> rows_;  // of the step
  Mapping inner_;   // [tokens of a step, ranks of all parts of an operation]
  Mapping inputs_;  // [tokens of a step, depth]: what layers of integers read, as floats
  size_t inner_width_ = 0;
  size_t inputs_width_ = 0;
};

}  // namespace llmserve
