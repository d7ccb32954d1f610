#include "thread_pool.h"

#include "float_mode.h"

namespace llmserve {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `value` is no longer `old`: briefly awake, then asleep.
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  constexpr int kSpins = 1000;  // tens of microseconds: the length of a small operation
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(unsigned num_threads) : num_threads_(num_threads) {
  try {
    for (unsigned i = 1; i < num_threads; ++i) workers_.emplace_back(&ThreadPool::work, this, i);
  } catch (...) {
    stop();  // a thread that still runs must not be destroyed
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_ = true;
  starts_.fetch_add(1, std::memory_order_release);
  starts_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(const std::function<void(unsigned)>& body) {
  const DefaultFloatMode mode;
  body_ = &body;
  starts_.fetch_add(1, std::memory_order_release);
  starts_.notify_all();
  body(0);
  barrier();
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t pass = passes_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    passes_.store(pass + 1, std::memory_order_release);
    passes_.notify_all();
  } else {
    wait_for_change(passes_, pass);
  }
}

void ThreadPool::work(unsigned index) {
  const DefaultFloatMode mode;
  uint32_t seen = 0;
  for (;;) {
    wait_for_change(starts_, seen);
    ++seen;
    if (stopping_) return;
    (*body_)(index);
    barrier();
  }
}

}  // namespace llmserve
