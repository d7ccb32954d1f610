// Round to nearest, subnormals kept, whatever the calling process has set: otherwise a result would depend on which
// thread computed it.
#pragma once

#include <cfenv>
#include <cstdint>

namespace llmserve {

class DefaultFloatMode {
 public:
#if defined(__aarch64__)  // here the C library's default environment leaves some bits of the mode as they are
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
