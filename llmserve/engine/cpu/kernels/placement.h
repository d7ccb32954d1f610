// The core on which each thread of a pool runs.
//
// Some systems wake a thread on the core of the thread that woke it, although another core is idle, and leave it there
// for the few milliseconds of a step. A worker on a taken core moves to a free one, once; it is not pinned.
#pragma once

#include <atomic>
#include <vector>

namespace llmserve {

class Placement {
 public:
  explicit Placement(unsigned num_threads) : cores_(num_threads) {}

  // Number of cores in this thread's affinity mask.
  static unsigned num_cores();

  // Records the core of `thread`, which is the caller.
  void enter(unsigned thread);

  // Like `enter`; if another thread has this core, moves to a core of the mask that no thread has, if there is one.
  void move(unsigned thread);

  void leave(unsigned thread) { cores_[thread].core.store(kNone, std::memory_order_relaxed); }

 private:
  static constexpr int kNone = -1;
  struct alignas(64) Place {
    std::atomic<int> core{kNone};
  };

  bool is_taken(unsigned thread, int core) const;

  std::vector<Place> cores_;
};

}  // namespace llmserve
