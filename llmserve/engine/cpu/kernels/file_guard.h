// Handles lost bytes of a mapped file (it was truncated, or its disk failed). The system answers a read of such bytes
// with SIGBUS, which would end the process. In a guarded mapping, zeros replace them, from the page that was read to
// the end of the mapping, and `lost` returns true. Computations on them finish and are discarded.
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

  // Starts to guard `mapping`, which must outlive the guard. Call once.
  void watch(const Mapping& mapping);

  bool lost() const { return range_ && range_->lost.load(); }

  struct Range {
    std::atomic<uintptr_t> begin = 0;  // 0: free for reuse
    std::atomic<size_t> bytes = 0;
    std::atomic<bool> lost = false;
    Range* next = nullptr;
  };

 private:
  Range* range_ = nullptr;
};

}  // namespace llmserve
