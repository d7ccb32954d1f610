// LoRA adapters of an open engine: low-rank matrices that a step adds to the outputs of linear layers, for the rows of
// the chunks that name them.
//
// Order of one output: the layer's own result, with bias and residual; then, for each part of its adapter, one
// sequential sum over the ranks. Inner numbers are sequential sums over the inputs, as in every float linear layer. So
// no bit depends on the other rows of the step.
//
// An adapter has no loop of its own. The loop of a layer begins with the inner numbers of its adapters. A thread that
// has computed some of the layer's panels waits for them, then adds what the adapters contribute to these panels.
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
inline constexpr uint32_t kMaxAdapterRanks = 16 * kMaxAdapterRank;  // ranks of all parts of an operation

// A part of an adapter: y[first_column ... + columns) += inner[first_rank ... + rank) @ up.T, where y is the output of
// one operation and inner = x @ down.T. The parts of an operation share `down`. The caller of `load` keeps the matrices
// until the adapter is unloaded.
struct AdapterPartRecord {
  const void* down;  // [num_ranks, depth] in panels
  const void* up;    // [columns, rank] in panels
  uint32_t op;       // number of the operation in the file
  uint32_t dtype;    // type of both matrices: kF32, kF16, kBF16
  uint32_t first_column;  // the first column of a panel of the operation
  uint32_t columns;
  uint32_t depth;
  uint32_t rank;
  uint32_t first_rank;
  uint32_t num_ranks;  // ranks of all parts of the operation
};
static_assert(sizeof(AdapterPartRecord) == 48);

struct Adapter {
  std::vector<AdapterPartRecord> parts;  // sorted by operation
  std::vector<uint32_t> begins;          // index of each operation's first part, and one more at the end

  std::span<const AdapterPartRecord> of(size_t op) const {
    return std::span(parts).subspan(begins[op], begins[op + 1] - begins[op]);
  }
};

// Consecutive rows of a step with the same adapter.
struct AdapterRows {
  const Adapter* adapter;
  uint32_t begin;
  uint32_t count;
};

class Adapters {
 public:
  // Puts an adapter into a free slot, counted from 1. Returns an error if it does not fit the file. Not during a step.
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
  std::vector<AdapterRows> rows_;  // rows of the current step
  Mapping inner_;   // [tokens of a step, ranks of all parts of an operation]
  Mapping inputs_;  // [tokens of a step, depth]: dequantized inputs of integer layers
  size_t inner_width_ = 0;
  size_t inputs_width_ = 0;
};

}  // namespace llmserve
