#include "thread_pool.h"

#include <chrono>

#include "float_mode.h"

namespace llmserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kClosed = 1u << 31;
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kSpinsPerLook = 16;  // spins per look at the clock

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // takes about as long as pause does on x86; yield takes no time at all
#endif
}

// Returns whether `holds` became true within kSpinTime.
template <class Fn>
bool spin_until(Fn holds) {
  const auto end = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerLook; ++i) {
      if (holds()) return true;
      pause();
    }
  } while (Clock::now() < end);
  return false;
}

}  // namespace

void wait_until(const std::atomic<uint32_t>& value, uint32_t wanted, bool spins) {
  if (spins && spin_until([&] { return value.load(std::memory_order_acquire) == wanted; })) return;
  for (uint32_t now; (now = value.load(std::memory_order_acquire)) != wanted;) {
    value.wait(now, std::memory_order_acquire);
  }
}

void TaskCounter::finish(uint32_t mine, uint32_t count) {
  if (done_.fetch_add(mine, std::memory_order_acq_rel) + mine == count) done_.notify_all();
}

ThreadPool::ThreadPool(unsigned num_threads)
    : num_threads_(num_threads),
      spins_(num_threads <= Placement::num_cores()),
      placement_(num_threads),
      inside_(kClosed) {
  try {
    for (unsigned i = 1; i < num_threads; ++i) workers_.emplace_back(&ThreadPool::work, this, i);
  } catch (...) {
    stop();  // a running thread must not be destroyed
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
  if (workers_.empty()) return body(0);
  placement_.enter(0);
  body_ = &body;
  inside_.store(0, std::memory_order_release);
  starts_.fetch_add(1, std::memory_order_release);
  starts_.notify_all();
  body(0);
  inside_.fetch_or(kClosed, std::memory_order_acq_rel);
  wait_until(inside_, kClosed, spins_);
}

bool ThreadPool::enter() {
  uint32_t inside = inside_.load(std::memory_order_relaxed);
  while (!(inside & kClosed)) {
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
  }
  return false;
}

void ThreadPool::leave() {
  if (inside_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) inside_.notify_all();
}

void ThreadPool::work(unsigned index) {
  const DefaultFloatMode mode;
  for (uint32_t seen = 0;;) {
    const auto changed = [&] { return starts_.load(std::memory_order_acquire) != seen; };
    if (!(spins_ && spin_until(changed))) starts_.wait(seen, std::memory_order_acquire);
    seen = starts_.load(std::memory_order_acquire);
    if (stopping_) return;
    if (!enter()) continue;
    placement_.move(index);
    (*body_)(index);
    placement_.leave(index);
    leave();
  }
}

}  // namespace llmserve
