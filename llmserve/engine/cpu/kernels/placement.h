// Which core each thread of a pool runs on.
//
// Some systems wake a thread on the core of the one that woke it although another core is idle, and leave it there for
// the few milliseconds that a step takes. A worker that finds itself on another's core moves, once; it is not pinned.
#pragma once

#include <atomic>
#include <vector>

namespace llmserve {

class Placement {
 public:
  explicit Placement(unsigned num_threads) : cores_(num_threads) {}

  // Cores in this thread's affinity mask.
  static unsigned num_cores();

  // `thread`, which calls this, is here.
  void enter(unsigned thread);

  // The same, and it moves to a core that no other thread has taken if this one is taken and the mask has such a core.
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
