#include "placement.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <thread>

namespace llmserve {

#if !defined(__linux__)  // a thread's core cannot be chosen

unsigned Placement::num_cores() {
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 ? cores : 1;
}

void Placement::enter(unsigned) {}

void Placement::move(unsigned) {}

#else

unsigned Placement::num_cores() {
  cpu_set_t mask;
  return sched_getaffinity(0, sizeof(mask), &mask) == 0 ? static_cast<unsigned>(CPU_COUNT(&mask)) : 1;
}

void Placement::enter(unsigned thread) { cores_[thread].core.store(sched_getcpu(), std::memory_order_relaxed); }

void Placement::move(unsigned thread) {
  enter(thread);
  if (!is_taken(thread, cores_[thread].core.load(std::memory_order_relaxed))) return;
  cpu_set_t mask, free;
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return;
  free = mask;
  for (const Place& place : cores_) {
    const int core = place.core.load(std::memory_order_relaxed);
    if (core >= 0) CPU_CLR(static_cast<size_t>(core), &free);
  }
  if (CPU_COUNT(&free) == 0) return;
  sched_setaffinity(0, sizeof(free), &free);
  enter(thread);
  sched_setaffinity(0, sizeof(mask), &mask);
}

bool Placement::is_taken(unsigned thread, int core) const {
  for (size_t i = 0; i < cores_.size(); ++i) {
    if (i != thread && cores_[i].core.load(std::memory_order_relaxed) == core) return true;
  }
  return false;
}

#endif

}  // namespace llmserve
