// Tests of the threads of a step: loops, late workers, placement on cores, the floating-point mode.
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <thread>
#include <vector>

#include "float_mode.h"
#include "test_support.h"
#include "thread_pool.h"

namespace llmserve {
namespace {

// Chains of long and short loops, each of which needs the previous one's results.
void test_loops() {
  constexpr size_t kCount = 1000, kLoops = 40;
  for (unsigned threads : {1u, 2u, 5u}) {
    ThreadPool pool(threads);
    std::vector<TaskCounter> counters(kLoops);
    for (int repeat = 0; repeat < 50; ++repeat) {
      std::vector<std::atomic<uint32_t>> values(kCount);
      std::atomic<bool> early{false};
      for (TaskCounter& counter : counters) counter.reset(pool.spins());
      pool.run([&](unsigned) {
        for (uint32_t i = 0; i < kLoops; ++i) {
          counters[i].for_pieces(i % 3 == 0 ? 1 : kCount, 1 + i, [&](size_t begin, size_t end) {
            if (i % 3 == 0) begin = 0, end = kCount;
            for (size_t k = begin; k < end; ++k) {
              if (values[k] != i || values[kCount - 1 - k] < i) early = true;
              values[k] = i + 1;
            }
          });
        }
      });
      const bool all = std::all_of(values.begin(), values.end(), [](uint32_t v) { return v == kLoops; });
      expect(all && !early, "thread_pool", "a chain of loops", threads);
    }
  }
}

// Workers that start only after the calling thread has done everything: a pool with a barrier would never finish.
void test_late_workers() {
  ThreadPool pool(3);
  TaskCounter counters[2];
  for (TaskCounter& counter : counters) counter.reset(pool.spins());
  std::atomic<bool> finished{false};
  std::atomic<unsigned> pieces{0};
  pool.run([&](unsigned thread) {
    while (thread != 0 && !finished) std::this_thread::yield();
    for (TaskCounter& counter : counters) counter.for_pieces(7, 2, [&](size_t, size_t) { ++pieces; });
    finished = true;
  });
  expect(pieces == 8, "thread_pool", "late workers", pieces);
}

// Rounds up, and flushes subnormals to zero.
void spoil_float_mode() {
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" : : "r"(mode | uint64_t{7} << 24));  // also default NaNs and alternative half precision
#endif
}

bool rounds_to_nearest() {
  volatile float one = 1.0f, little = 1e-10f;
  return one + little == 1.0f;
}

bool keeps_subnormals() {
  volatile float least = 1e-40f, half = 0.5f;
  return least * half != 0.0f;
}

// In any mode of the caller, a pool computes in the default mode and leaves the caller's unchanged.
void test_float_mode() {
  const DefaultFloatMode restored_at_the_end;
  spoil_float_mode();
  ThreadPool pool(3);
  TaskCounter counter;
  counter.reset(pool.spins());
  std::atomic<unsigned> wrong{0};
  pool.run([&](unsigned) {
    if (!rounds_to_nearest() || !keeps_subnormals()) ++wrong;
    counter.for_pieces(64, 1, [&](size_t, size_t) { std::this_thread::yield(); });
  });
  expect(wrong == 0, "thread_pool", "the usual mode of floating-point arithmetic", wrong);
  expect(!rounds_to_nearest() && !keeps_subnormals(), "thread_pool", "the caller's mode of arithmetic", 3);
}

#if defined(__linux__)
// Two threads claim this core: the second must move to another one, if there is one, and keep its affinity mask.
void test_placement() {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof(before), &before);
  Placement placement(2);
  placement.enter(0);
  const int core = sched_getcpu();
  placement.move(1);
  expect(Placement::num_cores() == 1 || sched_getcpu() != core, "placement", "a core of its own", 2);
  sched_getaffinity(0, sizeof(after), &after);
  expect(CPU_EQUAL(&before, &after), "placement", "affinity mask", 2);
}
#else
void test_placement() {}
#endif

}  // namespace

void test_threads() {
  test_loops();
  test_late_workers();
  test_placement();
  test_float_mode();
}

}  // namespace llmserve
