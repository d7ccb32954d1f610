// A fixed set of threads that execute the same function together, with a barrier inside.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace llmserve {

class ThreadPool {
 public:
  // `num_threads` includes the thread that calls `run`. Throws std::system_error when the system has no more threads.
  explicit ThreadPool(unsigned num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned size() const { return num_threads_; }

  // body(thread index) on every thread; returns when all have returned. `body` must not throw.
  void run(const std::function<void(unsigned)>& body);

  // Called inside `run` by every thread: nobody passes before all have come.
  void barrier();

 private:
  void work(unsigned index);
  void stop();

  const unsigned num_threads_;
  const std::function<void(unsigned)>* body_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> starts_{0};  // grows by one per run
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> passes_{0};  // grows by one per barrier
  std::vector<std::thread> workers_;
};

// Hands out [0, count) in pieces to whoever asks. One per loop and step; shared by all threads.
struct alignas(64) TaskCounter {
  std::atomic<size_t> next{0};

  // fn(begin, end) for pieces of `grain` until none are left.
  template <class Fn>
  void for_pieces(size_t count, size_t grain, Fn fn) {
    for (;;) {
      const size_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      fn(begin, begin + grain < count ? begin + grain : count);
    }
  }
};

}  // namespace llmserve
