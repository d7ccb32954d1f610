// Tactics of linear layers: buckets of row counts, the default tactic, and how a tactic is timed.
#pragma once

#include "kernels.h"

namespace llmserve {

// Row counts are in buckets: 1, 2, up to 4, up to 8, ... up to 128, more.
inline constexpr uint32_t kRowBuckets = 9;
uint32_t row_bucket(size_t num_rows);

// Returns the tactics supported here for a weight type and a bucket; empty if linear layers do not have this type.
std::span<const LinearTactic> tactics_for(const KernelTable& kernels, DType weight_type, uint32_t bucket);

// Returns the index of the tactic that is used if none was measured.
uint32_t default_tactic(std::span<const LinearTactic> tactics, uint32_t bucket);

struct LinearTrial {
  DType weight_type;
  size_t depth;
  size_t columns;
  size_t num_rows;
};

// Writes the seconds that each tactic of `tactics_for` needs: the fastest of a few runs on one thread, with weights
// that are not in a cache. Throws std::bad_alloc.
void time_linear(const KernelTable& kernels, const LinearTrial& trial, std::span<double> seconds);

}  // namespace llmserve
