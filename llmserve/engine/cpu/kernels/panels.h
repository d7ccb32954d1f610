// Keys and values for attention over a cache of integers, in panels of thirty-two positions.
#pragma once

#include <utility>

#include "kernels.h"
#include "queries.h"

namespace llmserve::LLMSERVE_VARIANT {

inline constexpr size_t kPanelsPerChunk = kChunkPositions / kPanelPositions;

// Hands out consecutive pieces of a buffer of floats.
class Scratch {
 public:
  explicit Scratch(float* begin) : next_(begin) {}
  float* take(size_t count) { return std::exchange(next_, next_ + attention_row_floats(count)); }
  template <class T>
  T* take_as(size_t count) {
    return reinterpret_cast<T*>(take((count * sizeof(T) + sizeof(float) - 1) / sizeof(float)));
  }

 private:
  float* next_;
};

// Thirty-two positions of keys or of values: in place in their block, or a copy if a panel spans blocks. Copies
// of keys hold one panel, those of values all panels of a chunk.
template <class Element>
struct Panel {
  const Element* elements;
  size_t step_bytes;    // from four dimensions of keys, or four positions of values, to the next four
  const float* scales;  // for each position; keys: and for each group of dimensions, scale_stride floats apart
  size_t scale_stride;
};

class Panels {
 public:
  // `length`: positions that exist.
  Panels(const AttentionArgs& args, size_t kv_head, size_t length, Scratch& scratch)
      : args_(args), shape_(args.shape), head_offset_(kv_head * shape_.head_bytes()), length_(length),
        whole_(shape_.block_size % kPanelPositions == 0),
        elements_(scratch.take_as<std::byte>(kChunkPositions * shape_.value_step_bytes() / 4)),
        scales_(scratch.take(kChunkPositions * num_quantized_groups(shape_.head_dim))) {}

  Panel<uint8_t> keys(size_t panel) const {
    const size_t p = panel * kPanelPositions, place = p % shape_.block_size;
    if (!whole_) return copied_keys(p);
    const std::byte* head = head_at(args_.key_plane, p);
    return {reinterpret_cast<const uint8_t*>(head) + 4 * place, shape_.key_step_bytes(), scales_at(head, place),
            shape_.block_size};
  }

  Panel<int8_t> values(size_t panel) const {
    const size_t p = panel * kPanelPositions, place = p % shape_.block_size;
    if (!whole_) return copied_values(p);
    const std::byte* head = head_at(args_.value_plane, p);
    return {reinterpret_cast<const int8_t*>(head) + place / 4 * shape_.value_step_bytes(), shape_.value_step_bytes(),
            scales_at(head, place), 0};
  }

 private:
  const std::byte* head_at(const std::byte* plane, size_t position) const {
    const auto block = static_cast<size_t>(args_.block_ids[position / shape_.block_size]);
    return plane + block * shape_.block_bytes() + head_offset_;
  }
  const float* scales_at(const std::byte* head, size_t place) const {
    return reinterpret_cast<const float*>(head + shape_.element_bytes()) + place;
  }
  size_t left(size_t p) const { return smaller(kPanelPositions, length_ - p); }

  Panel<uint8_t> copied_keys(size_t begin) const {
    const size_t groups = num_quantized_groups(shape_.head_dim);
    for (size_t i = 0; i < left(begin); ++i) {
      const size_t place = (begin + i) % shape_.block_size;
      const std::byte* head = head_at(args_.key_plane, begin + i);
      for (size_t step = 0; 4 * step < shape_.head_dim; ++step) {
        const std::byte* quad = head + step * shape_.key_step_bytes() + 4 * place;
        __builtin_memcpy(elements_ + (step * kPanelPositions + i) * 4, quad, 4);
      }
      const float* scales = scales_at(head, place);
      for (size_t g = 0; g < groups; ++g) scales_[g * kPanelPositions + i] = scales[g * shape_.block_size];
    }
    return {reinterpret_cast<const uint8_t*>(elements_), 4 * kPanelPositions, scales_, kPanelPositions};
  }

  Panel<int8_t> copied_values(size_t begin) const {
    const size_t slot = begin % kChunkPositions;
    for (size_t i = 0; i < left(begin); ++i) {
      const size_t place = (begin + i) % shape_.block_size, step_bytes = shape_.value_step_bytes();
      const std::byte* head = head_at(args_.value_plane, begin + i);
      const std::byte* source = head + place / 4 * step_bytes + place % 4;
      std::byte* target = elements_ + (slot + i) / 4 * step_bytes + i % 4;
      for (size_t d = 0; d < shape_.head_dim; ++d) target[4 * d] = source[4 * d];
      scales_[slot + i] = *scales_at(head, place);
    }
    const std::byte* elements = elements_ + slot / 4 * shape_.value_step_bytes();
    return {reinterpret_cast<const int8_t*>(elements), shape_.value_step_bytes(), scales_ + slot, 0};
  }

  const AttentionArgs& args_;
  const CacheShape& shape_;
  const size_t head_offset_, length_;
  const bool whole_;
  std::byte* const elements_;
  float* const scales_;
};

}  // namespace llmserve::LLMSERVE_VARIANT
