// A fixed set of threads that share the work of loops.
//
// There is no barrier. A loop ends when its pieces are done, by whichever threads, so no thread waits for one that the
// system has preempted. With more threads than cores, or next to a busy process, the others take over its pieces.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "placement.h"

namespace llmserve {

// Returns when `value` is `wanted`. With `spins`, spins first, for about as long as it takes to fall asleep and be
// woken. The thread that stores `wanted` calls notify_all.
void wait_until(const std::atomic<uint32_t>& value, uint32_t wanted, bool spins);

// One loop over [0, count), shared by all threads of a run.
class TaskCounter {
 public:
  // Call before a run. `spins`: see wait_until.
  void reset(bool spins) {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    spins_ = spins;
  }

  // Calls fn(begin, end) for pieces of `grain` until none are left. Returns when all are done, by any thread.
  template <class Fn>
  void for_pieces(size_t count, size_t grain, Fn fn) {
    begin_pieces(count, grain, fn);
    wait(count);
  }

  // The same, but returns when no piece is left to begin.
  template <class Fn>
  void begin_pieces(size_t count, size_t grain, Fn fn) {
    if (done_.load(std::memory_order_acquire) == count) return;
    size_t mine = 0;
    for (;;) {
      const size_t begin = next_.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) break;
      const size_t end = begin + grain < count ? begin + grain : count;
      fn(begin, end);
      mine += end - begin;
    }
    if (mine > 0) finish(static_cast<uint32_t>(mine), static_cast<uint32_t>(count));
  }

  // Returns when all `count` are done.
  void wait(size_t count) {
    if (done_.load(std::memory_order_acquire) != count) wait_until(done_, static_cast<uint32_t>(count), spins_);
  }

 private:
  void finish(uint32_t mine, uint32_t count);

  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  bool spins_ = false;
};

class ThreadPool {
 public:
  // `num_threads` includes the thread that calls `run`. Throws std::system_error if a thread cannot be created.
  explicit ThreadPool(unsigned num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned size() const { return num_threads_; }

  // Whether a thread may spin: only if every thread can have a core.
  bool spins() const { return spins_; }

  // Calls body(0) here and body(thread index) on the workers that wake up in time; returns when no thread is in the
  // body. The body shares its work through TaskCounters and returns when all of it is done. A worker may call it late,
  // when no work is left. It must not throw.
  void run(const std::function<void(unsigned)>& body);

 private:
  void work(unsigned index);
  bool enter();
  void leave();
  void stop();

  const unsigned num_threads_;
  const bool spins_;
  Placement placement_;
  const std::function<void(unsigned)>* body_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> starts_{0};  // increases by one per run
  alignas(64) std::atomic<uint32_t> inside_;     // workers in the body; top bit: no more may enter
  std::vector<std::thread> workers_;
};

}  // namespace llmserve
