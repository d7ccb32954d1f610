// Tactics of linear layers: how the rows of a step are counted, what is taken by default, and how one is timed.
#pragma once

#include "kernels.h"

namespace llmserve {

// Rows are counted in buckets: 1, 2, up to 4, up to 8, ... up to 128, more.
inline constexpr uint32_t kRowBuckets = 9;
uint32_t row_bucket(size_t num_rows);

// The tactics for weights of this type and so many rows that run here; empty for a type that linear layers do not have.
std::span<const LinearTactic> tactics_for(const KernelTable& kernels, DType weight_type, uint32_t bucket);

// What is taken where nothing was measured, out of these.
uint32_t default_tactic(std::span<const LinearTactic> tactics, uint32_t bucket);

struct LinearTrial {
  DType weight_type;
  size_t depth;
  size_t columns;
  size_t num_rows;
};

// Seconds that each of `tactics_for` these weights needs: the fastest of a few runs on one thread, over weights that are
// not in a cache. Throws std::bad_alloc.
void time_linear(const KernelTable& kernels, const LinearTrial& trial, std::span<double> seconds);

}  // namespace llmserve
