// Writes the keys and values of a step to the paged cache, after the keys' rotary embedding.
#include <type_traits>

#include "mixing.h"
#include "rows.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// Converts one row of one head to the number format of the cache.
template <class T>
void convert(const float* x, size_t head_dim, T* y) {
  for_lanes(
      head_dim, [&](size_t i) { store(y + i, load(x + i)); },
      [&](size_t i, size_t n) { store_partial(y + i, load_partial(x + i, n), n); });
}

template <class T>
class Writer {
 public:
  explicit Writer(const CacheWriteArgs& args) : args_(args) {}

  void run() const {
    const CacheShape& shape = args_.shape;
    for (size_t r = 0; r < args_.num_rows; ++r) {
      const auto slot = static_cast<size_t>(args_.slots[r]);
      const size_t place = slot % shape.block_size;
      for (size_t head = 0; head < shape.num_kv_heads; ++head) {
        const size_t offset = slot / shape.block_size * shape.block_bytes() + head * shape.head_bytes();
        write_key(r, head, place, args_.key_plane + offset);
        write_value(r, head, place, args_.value_plane + offset);
      }
    }
  }

 private:
  void write_key(size_t r, size_t head, size_t place, std::byte* target) const {
    const size_t head_dim = args_.shape.head_dim;
    const float* key = args_.keys.row(r) + head * head_dim;
    float turned[kMaxHeadDim];
    if (args_.rope.data) {
      rotate_head(key, args_.rope.row(r), args_.rotary_dim, head_dim, turned);
      key = turned;
    }
    if constexpr (kHasIntegers) {
      write_integer_key(key, place, target);
    } else {
      T elements[kMaxHeadDim];
      convert(key, head_dim, elements);
      T* column = reinterpret_cast<T*>(target) + place;
      for (size_t d = 0; d < head_dim; ++d) column[d * args_.shape.block_size] = elements[d];
    }
  }

  void write_integer_key(const float* key, size_t place, std::byte* target) const {
    const CacheShape& shape = args_.shape;
    float mixed[kMaxHeadDim];
    mix_head<false>(key, shape.head_dim, mixed);
    int8_t elements[kMaxHeadDim];
    float scales[num_quantized_groups(kMaxHeadDim)];
    int32_t offsets[num_quantized_groups(kMaxHeadDim)];
    quantize_groups(mixed, shape.head_dim, 0, elements, scales, offsets);
    auto* column = reinterpret_cast<uint8_t*>(target) + 4 * place;
    for (size_t d = 0; d < shape.head_dim; d += 4, column += shape.key_step_bytes()) {
      for (size_t i = 0; i < 4; ++i) column[i] = static_cast<uint8_t>(elements[d + i] + 128);
    }
    auto* scale = reinterpret_cast<float*>(target + shape.element_bytes()) + place;
    for (size_t g = 0; g < num_quantized_groups(shape.head_dim); ++g) scale[g * shape.block_size] = scales[g];
  }

  void write_value(size_t r, size_t head, size_t place, std::byte* target) const {
    const CacheShape& shape = args_.shape;
    const float* value = args_.values.row(r) + head * shape.head_dim;
    if constexpr (kHasIntegers) {
      int8_t elements[kMaxHeadDim];
      const float scale = quantize_row(value, shape.head_dim, elements);
      auto* row = reinterpret_cast<int8_t*>(target) + place / 4 * shape.value_step_bytes() + place % 4;
      for (size_t d = 0; d < shape.head_dim; ++d) row[4 * d] = elements[d];
      reinterpret_cast<float*>(target + shape.element_bytes())[place] = scale;
    } else {
      convert(value, shape.head_dim, reinterpret_cast<T*>(target) + place * shape.head_dim);
    }
  }

  static constexpr bool kHasIntegers = std::is_same_v<T, int8_t>;

  const CacheWriteArgs& args_;
};

}  // namespace

void cache_write(const CacheWriteArgs& args) {
  switch (args.shape.type) {
    case DType::kF32:
      return Writer<float>(args).run();
    case DType::kF16:
      return Writer<Half>(args).run();
    case DType::kBF16:
      return Writer<BFloat16>(args).run();
    case DType::kI8:
      return Writer<int8_t>(args).run();
    case DType::kI4:  // not types of a cache
    case DType::kI5:
    case DType::kI6:
    case DType::kI2:
    case DType::kI3:
      break;
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
