// What this machine does at most per second: the yardstick for `make bench` and for estimates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"

namespace llmserve {

struct KernelTable;

enum class Limit : uint32_t { kRead = 0, kMultiply = 1, kMultiplyInt8 = 2 };

// What one thread's loop works on.
struct LimitInput {
  const float* data;      // kRead: `count` floats
  size_t count;           // kRead: floats, a multiple of 256; otherwise rounds of the loop
  float factor;           // kMultiply: in (0, 1)
  const int8_t* quad;      // kMultiplyInt8: four inputs, and four weights for each of sixteen columns, whose products
  const uint8_t* weights;  // cancel out, so that no sum ever overflows
  float* sink;            // takes a result, so that no loop can be left out
};

// Each runs one loop once and returns the bytes it read, or the products it added up. `way`: any number; there are a few
// ways to write each loop.
struct LimitLoops {
  uint64_t (*read)(const LimitInput& input, size_t way);
  uint64_t (*multiply)(const LimitInput& input, size_t way);
  uint64_t (*multiply_int8)(const LimitInput& input, size_t way);
};

struct LimitRequest {
  Limit limit;
  uint32_t num_threads;
  uint64_t amount;  // of one pass, all threads together. kRead: bytes; otherwise rounds of the loop in each thread
  uint32_t num_passes;
};

// Writes what each pass reached, per second: bytes, or products. Passes take turns among the ways.
Error measure_limit(const KernelTable& kernels, const LimitRequest& request, double* rates);

}  // namespace llmserve
