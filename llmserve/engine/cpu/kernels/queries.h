// The queries of an attention task: heads of rows, cut into tiles.
#pragma once

#include "kernels.h"

namespace llmserve::LLMSERVE_VARIANT {

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
constexpr size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// One head of one row, and the positions [first, end) that it attends to.
struct Query {
  size_t row;
  size_t head;
  size_t first;
  size_t end;
};

// Calls run(queries, count) for tiles of at most kMost queries: rows [row_begin, row_end) of a KV head's heads.
template <size_t kMost, class Run>
void for_tiles(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, Run run) {
  const size_t group = args.num_heads / args.shape.num_kv_heads, total = row_end * group;
  for (size_t index = row_begin * group; index < total;) {
    const size_t tiles_left = (total - index + kMost - 1) / kMost;
    const size_t count = (total - index + tiles_left - 1) / tiles_left;  // balanced: 16 are 8 + 8, not 12 + 4
    Query queries[kMost];
    for (size_t n = 0; n < count; ++n) {
      const size_t row = (index + n) / group, end = args.end ? args.end : args.start + row + 1;
      size_t first = args.window && end > args.window ? end - args.window : 0;
      if (args.in_chunks) first = (end - 1) / args.window * args.window;
      queries[n] = {row, kv_head * group + (index + n) % group, first, end};
    }
    run(queries, count);
    index += count;
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
