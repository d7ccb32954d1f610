// Measures the peak rates of this machine, the reference for `make bench` and for estimates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"

namespace llmserve {

struct KernelTable;

enum class Limit : uint32_t { kRead = 0, kMultiply = 1, kMultiplyInt8 = 2 };

// Input of one thread's loop.
struct LimitInput {
  const float* data;      // kRead: `count` floats
  size_t count;           // kRead: floats, a multiple of 256; otherwise rounds of the loop
  float factor;           // kMultiply: in (0, 1)
  const int8_t* quad;      // kMultiplyInt8: four inputs, and four weights for each of sixteen columns, whose products
  const uint8_t* weights;  // cancel out, so that no sum ever overflows
  float* sink;            // receives a result, so that the compiler keeps the loop
};

// Each function runs one loop once and returns the bytes that it read, or the products that it summed. `way`: any
// number; it selects one of a few ways to write the loop.
struct LimitLoops {
  uint64_t (*read)(const LimitInput& input, size_t way);
  uint64_t (*multiply)(const LimitInput& input, size_t way);
  uint64_t (*multiply_int8)(const LimitInput& input, size_t way);
};

struct LimitRequest {
  Limit limit;
  uint32_t num_threads;
  uint64_t amount;  // per pass: kRead: bytes, of all threads together; otherwise rounds of the loop in each thread
  uint32_t num_passes;
};

// Writes the rate of each pass: bytes or products per second. Passes use the ways in turn.
Error measure_limit(const KernelTable& kernels, const LimitRequest& request, double* rates);

}  // namespace llmserve
