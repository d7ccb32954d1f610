// Layout of a layer's keys and values in the paged cache.
//
// There are two planes, each [block][kv head]. Within a head of a block, keys are [head_dim][block_size], so that a
// vector holds sixteen positions and a score is one sum over the dimensions, in order. Values: [block_size][head_dim].
//
// Integers are stored in the order of byte products, which sum over four adjacent bytes:
//
//   keys    u8 [head_dim / 4][block_size][4], each plus 128; then f32 scales [group of 32 dimensions][block_size]
//   values  i8 [block_size / 4][head_dim][4], head_dim padded to a multiple of sixteen; then f32 scales [block_size]
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
  size_t stride = 0;  // bytes from one block to the next; 0: the size of a block

  bool has_integers() const { return type == DType::kI8; }
  // Bytes of four dimensions of integer keys, and of four positions of integer values.
  size_t key_step_bytes() const { return 4 * block_size; }
  size_t value_step_bytes() const { return 4 * ((head_dim + 15) / 16 * 16); }
  // Bytes of one head in one block, without scales. A multiple of four; the same for keys and values.
  size_t element_bytes() const {
    if (!has_integers()) return (dtype_bytes(type) * block_size * head_dim + 3) / 4 * 4;
    const size_t keys = (head_dim + 3) / 4 * key_step_bytes(), values = (block_size + 3) / 4 * value_step_bytes();
    return keys > values ? keys : values;
  }
  size_t head_bytes() const {
    return element_bytes() + (has_integers() ? sizeof(float) * num_quantized_groups(head_dim) * block_size : 0);
  }
  size_t block_bytes() const { return stride ? stride : num_kv_heads * head_bytes(); }
};

}  // namespace llmserve
