// Round to nearest, subnormals kept, whatever the calling process has set: otherwise a result would depend on which
// thread computed it.
#pragma once

#include <cfenv>

namespace llmserve {

class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace llmserve
