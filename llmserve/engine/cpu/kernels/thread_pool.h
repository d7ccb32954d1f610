// A fixed set of threads that work off the same loops together.
//
// There is no barrier. A loop is over when its pieces are done, whoever did them, so that nobody waits for a thread that
// the system has put aside: with more threads than cores, or beside a busy process, the others take its pieces.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "placement.h"

namespace llmserve {

// Returns when `value` is `wanted`. Awake at first when `spins`, for about as long as falling asleep and being woken take.
// Whoever stores `wanted` calls notify_all.
void wait_until(const std::atomic<uint32_t>& value, uint32_t wanted, bool spins);

// One loop over [0, count), shared by all threads of a run.
class TaskCounter {
 public:
  // Before a run. `spins`: see wait_until.
  void reset(bool spins) {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    spins_ = spins;
  }

  // fn(begin, end) for pieces of `grain` until none are left; returns when all are done, by whichever thread.
  template <class Fn>
  void for_pieces(size_t count, size_t grain, Fn fn) {
    begin_pieces(count, grain, fn);
    wait(count);
  }

  // The same, but returns when none are left to begin.
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

  // Until all are done.
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
  // `num_threads` includes the thread that calls `run`. Throws std::system_error when the system has no more threads.
  explicit ThreadPool(unsigned num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned size() const { return num_threads_; }

  // Whether a thread may wait awake: only while every thread can have a core.
  bool spins() const { return spins_; }

  // body(0) here and body(thread index) on the workers that wake up in time, until none is inside. The body shares its
  // work out through TaskCounters and returns when all of it is done; a worker may call it late, when nothing is left.
  // It must not throw.
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
  alignas(64) std::atomic<uint32_t> starts_{0};  // grows by one per run
  alignas(64) std::atomic<uint32_t> inside_;     // workers in the body; the top bit: nobody enters any more
  std::vector<std::thread> workers_;
};

}  // namespace llmserve
