// Shared by the kernel tests: random numbers, and plain second implementations of number formats and packing.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "engine_file.h"
#include "kernels.h"

namespace llmserve {

inline int num_failures = 0;

// Prints and counts a failure if `holds` is false.
inline void expect(bool holds, const char* variant, const char* what, size_t size) {
  if (holds) return;
  ++num_failures;
  std::printf("FAILED %s %s (size %zu)\n", variant, what, size);
}

// A small generator, so that every machine tests the same numbers.
class Random {
 public:
  uint32_t bits() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float number() { return static_cast<float>(bits() % 2001) / 1000.0f - 1.0f; }
  std::vector<float> numbers(size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = number();
    return values;
  }

 private:
  uint64_t state_ = 42;
};

// An array followed by an inaccessible page, so that a read past its end stops the program.
template <class T>
class Guarded {
 public:
  explicit Guarded(size_t count)
      : bytes_(count * sizeof(T)), guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
        pages_((bytes_ + guard_ - 1) / guard_ * guard_) {
    void* address = mmap(nullptr, pages_ + guard_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) std::abort();
    start_ = static_cast<std::byte*>(address);
    if (mprotect(start_ + pages_, guard_, PROT_NONE) != 0) std::abort();
  }
  template <class Values>
  explicit Guarded(const Values& values) requires requires { values.size(); } : Guarded(values.size()) {
    std::memcpy(data(), values.data(), bytes_);
  }
  ~Guarded() { munmap(start_, pages_ + guard_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return reinterpret_cast<T*>(start_ + pages_ - bytes_); }
  const T* data() const { return reinterpret_cast<const T*>(start_ + pages_ - bytes_); }
  T& operator[](size_t i) { return data()[i]; }

 private:
  const size_t bytes_, guard_, pages_;  // guard_: one page of the system
  std::byte* start_ = nullptr;
};

// A row of random numbers in `type`, as bytes and as floats.
struct Typed {
  std::vector<std::byte> bytes;
  std::vector<float> values;

  Typed(Random& random, size_t count, DType type) : bytes(count * dtype_bytes(type)), values(count) {
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(random.bits() % 257) / 128.0f - 1.0f;  // exact in all three types
      values[i] = value;
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      uint16_t narrow = static_cast<uint16_t>(bits >> 16);
      if (type == DType::kF16) {
        const uint32_t sign = bits >> 16 & 0x8000u;
        narrow = static_cast<uint16_t>(value == 0.0f ? 0u : sign | ((bits & 0x7fffffffu) - 0x38000000u) >> 13);
      }
      if (type == DType::kF32) std::memcpy(&bytes[i * 4], &bits, 4);
      if (type != DType::kF32) std::memcpy(&bytes[i * 2], &narrow, 2);
    }
  }
};

inline constexpr size_t kSizes[] = {1, 2, 7, 15, 16, 17, 33, 64, 65, 100, 130};
inline constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

inline bool near(double a, double b) { return std::fabs(a - b) <= 2e-5 * (1.0 + std::fabs(b)); }

// Packs a weight [columns, depth] of floats as in `format.h`.
inline std::vector<std::byte> packed(const std::byte* rows, size_t columns, size_t depth, DType type) {
  const size_t bytes = dtype_bytes(type), num_panels = (columns + kPanelColumns - 1) / kPanelColumns;
  std::vector<std::byte> out(num_panels * kPanelColumns * depth * bytes);
  for (size_t n = 0; n < columns; ++n) {
    for (size_t k = 0; k < depth; ++k) {
      const size_t column = n % kPanelColumns;
      const size_t lane = type == DType::kBF16 ? column % 16 * 2 + column / 16 : column;
      const size_t place = (n / kPanelColumns * depth + k) * kPanelColumns + lane;
      std::memcpy(&out[place * bytes], rows + (n * depth + k) * bytes, bytes);
    }
  }
  return out;
}

// Packs weights [columns, depth] from -128 to 127 as 8-bit weights (`format.h`).
inline std::vector<uint8_t> packed_bytes(const std::vector<int>& rows, size_t columns, size_t depth) {
  const size_t steps = (depth + 3) / 4, num_panels = (columns + kPanelColumns - 1) / kPanelColumns;
  std::vector<uint8_t> out(num_panels * steps * 128);
  for (size_t n = 0; n < columns; ++n) {
    for (size_t k = 0; k < depth; ++k) {
      const size_t place = ((n / kPanelColumns * steps + k / 4) * kPanelColumns + n % kPanelColumns) * 4 + k % 4;
      out[place] = static_cast<uint8_t>(rows[n * depth + k] + 128);
    }
  }
  return out;
}

// Packs weights [columns, depth] from 0 to 15 as 4-bit weights (`format.h`).
inline std::vector<uint8_t> packed_nibbles(const std::vector<int>& rows, size_t columns, size_t depth) {
  const size_t steps = (depth + 3) / 4, num_panels = (columns + kPanelColumns - 1) / kPanelColumns;
  std::vector<uint8_t> out(num_panels * steps * 64);
  for (size_t n = 0; n < columns; ++n) {
    for (size_t k = 0; k < depth; ++k) {
      const size_t column = n % kPanelColumns;
      const size_t place = ((n / kPanelColumns * steps + k / 4) * 16 + column % 16) * 4 + k % 4;
      out[place] |= static_cast<uint8_t>(rows[n * depth + k] << (column < 16 ? 0 : 4));
    }
  }
  return out;
}

void test_threads();
void test_linear_layers(const KernelTable& kernels, Random& random);
void test_attention(const KernelTable& k, Random& random);
void test_states(const KernelTable& k, Random& random);
void test_streams(const KernelTable& k, Random& random);
void test_sampling(const KernelTable& k, Random& random);
void test_choosing(const KernelTable& k, Random& random);

}  // namespace llmserve
