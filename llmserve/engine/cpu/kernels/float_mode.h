// Sets round to nearest and keeps subnormals, whatever mode the calling process has set. Otherwise a result would
// depend on the thread that computed it.
#pragma once

#include <cfenv>
#include <cstdint>

namespace llmserve {

class DefaultFloatMode {
 public:
#if defined(__aarch64__)  // the C library's default environment leaves some bits of the mode unchanged here
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__aarch64__)
  uint64_t saved_;
#else
  std::fenv_t saved_;
#endif
};

}  // namespace llmserve
