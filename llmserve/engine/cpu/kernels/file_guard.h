// What happens when bytes of a mapped file are gone (it was truncated, its disk failed): the system answers a read of
// them with SIGBUS, which would end the process. In a mapping that is guarded, zeros take their place instead, from the
// page that was read to the mapping's end, and `lost` says so. Whoever computes with them finishes and throws it away.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memory.h"

namespace llmserve {

class FileGuard {
 public:
  FileGuard() = default;
  ~FileGuard();
  FileGuard(const FileGuard&) = delete;
  FileGuard& operator=(const FileGuard&) = delete;

  // Once; `mapping` has to outlive the guard.
  void watch(const Mapping& mapping);

  bool lost() const { return range_ && range_->lost.load(); }

  struct Range {
    std::atomic<uintptr_t> begin = 0;  // 0: nobody's
    std::atomic<size_t> bytes = 0;
    std::atomic<bool> lost = false;
    Range* next = nullptr;
  };

 private:
  Range* range_ = nullptr;
};

}  // namespace llmserve
