// Where the paged cache keeps the keys and values of a layer.
//
// Two planes, each [block][kv head]. Within a head of a block, keys lie [head_dim][block_size], so that a vector holds
// sixteen positions and a score is a plain chain over the dimensions; values lie [block_size][head_dim]. Integers are
// followed by the scale of each position, a float: element = integer * scale.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format.h"

namespace llmserve {

struct CacheShape {
  DType type;  // kF32, kF16, kBF16, kI8
  size_t block_size;
  size_t num_kv_heads;
  size_t head_dim;

  bool has_scales() const { return type == DType::kI8; }
  // Of one head in one block, without the scales; a multiple of four.
  size_t element_bytes() const { return (dtype_bytes(type) * block_size * head_dim + 3) / 4 * 4; }
  size_t head_bytes() const { return element_bytes() + (has_scales() ? sizeof(float) * block_size : 0); }
  size_t block_bytes() const { return num_kv_heads * head_bytes(); }
};

}  // namespace llmserve
