// Puts the keys and values of a step into the paged cache, keys turned by their position.
#include "rows.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// One row of one head, in the number format of the cache. Returns the scale of integers.
template <class T>
float convert(const float* x, size_t head_dim, T* y) {
  for_lanes(
      head_dim, [&](size_t i) { store(y + i, load(x + i)); },
      [&](size_t i, size_t n) { store_partial(y + i, load_partial(x + i, n), n); });
  return 1.0f;
}

float convert(const float* x, size_t head_dim, int8_t* y) {
  return quantize_row(x, head_dim, y);
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
    T elements[kMaxHeadDim];
    const float scale = convert(key, head_dim, elements);
    T* column = reinterpret_cast<T*>(target) + place;
    for (size_t d = 0; d < head_dim; ++d) column[d * args_.shape.block_size] = elements[d];
    write_scale(scale, place, target);
  }

  void write_value(size_t r, size_t head, size_t place, std::byte* target) const {
    const size_t head_dim = args_.shape.head_dim;
    const float* value = args_.values.row(r) + head * head_dim;
    write_scale(convert(value, head_dim, reinterpret_cast<T*>(target) + place * head_dim), place, target);
  }

  void write_scale(float scale, size_t place, std::byte* target) const {
    if (args_.shape.has_scales()) reinterpret_cast<float*>(target + args_.shape.element_bytes())[place] = scale;
  }

  const CacheWriteArgs& args_;
};

}  // namespace

void cache_write(const CacheWriteArgs& args) {
  switch (args.shape.type) {
    case DType::kF32:
      return Writer<float>(args).run();
    case DType::kF16:
      return Writer<Half>(args).run();
    case DType::kI8:
      return Writer<int8_t>(args).run();
    default:
      return Writer<BFloat16>(args).run();
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
