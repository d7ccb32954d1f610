// Number formats and row views shared by every kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmserve {

struct Half {  // IEEE binary16
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// Rows of a matrix, `stride` elements apart.
template <class T>
struct View {
  T* data = nullptr;
  size_t stride = 0;

  [[gnu::always_inline]] T* row(size_t index) const { return data + index * stride; }
};

}  // namespace llmserve
