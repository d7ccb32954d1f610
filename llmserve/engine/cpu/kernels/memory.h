// Memory mapped from the system, anonymous (zeroed) or of a file: page-aligned, allocated when first touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <utility>

namespace llmserve {

// Requests large pages where the system supports them.
inline void want_large_pages([[maybe_unused]] void* address, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(address, bytes, MADV_HUGEPAGE);
#endif
}

class Mapping {
 public:
  Mapping() = default;
  ~Mapping() { release(); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }

  // Anonymous memory; `data()` is null if there is not enough. Zero bytes give an empty mapping.
  static Mapping anonymous(size_t bytes) {
    Mapping mapping;
    if (bytes == 0) return mapping;
    mapping.adopt(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0), bytes);
    if (mapping.data_) want_large_pages(mapping.data_, bytes);
    return mapping;
  }

  // A read-only mapping, also with large pages: where the file system supports it, uncached parts are read into them.
  static Mapping of_file(int descriptor, size_t bytes) {
    Mapping mapping;
    mapping.adopt(mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0), bytes);
    if (mapping.data_) want_large_pages(mapping.data_, bytes);
    return mapping;
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return size_; }

 private:
  void adopt(void* address, size_t bytes) {
    if (address == MAP_FAILED) return;
    data_ = address;
    size_ = bytes;
  }
  void swap(Mapping& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  void release() {
    if (data_) munmap(data_, size_);
  }

  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace llmserve
