#include "limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace llmserve {
namespace {

using Clock = std::chrono::steady_clock;
using Loop = uint64_t (*)(const LimitInput& input, size_t way);

constexpr size_t kReadStep = 256;  // floats; a multiple of the floats that any read loop takes at once
constexpr size_t kLeastBytes = kReadStep * sizeof(float);

// Memory for one thread, in large pages if the system has them. Null if there is not enough memory.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) return;
    address_ = address;
    want_large_pages(address_, bytes_);
  }
  Pages(Pages&& other) noexcept : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  ~Pages() {
    if (address_) munmap(address_, bytes_);
  }

  explicit operator bool() const { return address_ != nullptr; }
  // Called by the thread that will read the pages, so that they are close to it, and not all the shared page of zeros.
  void touch() { std::memset(address_, 0, bytes_); }
  const float* data() const { return static_cast<const float*>(address_); }

 private:
  void* address_ = nullptr;
  size_t bytes_;
};

// Bytes that each thread reads per pass.
size_t share(const LimitRequest& request) {
  return std::max<size_t>(request.amount / request.num_threads / kLeastBytes, 1) * kLeastBytes;
}

struct Operands {
  int8_t quad[4] = {101, -101, -55, 55};
  uint8_t weights[64];

  Operands() {
    for (int i = 0; i < 64; i += 4) {
      for (int j = 0; j < 4; ++j) weights[i + j] = static_cast<uint8_t>(130 + i + j / 2);
    }
  }
};

struct Pass {
  Clock::time_point begin, end;
  uint64_t amount = 0;
};

class Measurement {
 public:
  Measurement(const LimitLoops& loops, const LimitRequest& request, std::vector<Pages> pages)
      : loops_(loops), request_(request), pages_(std::move(pages)), barrier_(request.num_threads),
        passes_(size_t{request.num_threads} * request.num_passes) {}

  void run() {
    std::vector<std::thread> threads;  // not jthread, which some standard libraries lack
    const auto end = [&](State state) {
      start(state);
      for (std::thread& thread : threads) thread.join();
    };
    try {
      for (uint32_t thread = 0; thread < request_.num_threads; ++thread) {
        threads.emplace_back([this, thread] { work(thread); });
      }
    } catch (...) {
      end(kAbandoned);
      throw;
    }
    end(kStarted);
  }

  // The rate of all threads together, from the first start to the last end.
  double rate(uint32_t pass) const {
    Pass all = at(pass, 0);
    for (uint32_t thread = 1; thread < request_.num_threads; ++thread) {
      const Pass& one = at(pass, thread);
      all = {std::min(all.begin, one.begin), std::max(all.end, one.end), all.amount + one.amount};
    }
    return static_cast<double>(all.amount) / std::chrono::duration<double>(all.end - all.begin).count();
  }

 private:
  enum State : int { kWaiting, kStarted, kAbandoned };

  void start(State state) {
    state_.store(state);
    state_.notify_all();
  }

  void work(uint32_t thread) {
    state_.wait(kWaiting);
    if (state_.load() == kAbandoned) return;
    const bool reads = request_.limit == Limit::kRead;
    if (reads) pages_[thread].touch();
    const Operands operands;
    float sink = 0.0f;
    const LimitInput input = {.data = reads ? pages_[thread].data() : nullptr,
                              .count = reads ? share(request_) / sizeof(float) : request_.amount,
                              .factor = 0.5f,
                              .quad = operands.quad,
                              .weights = operands.weights,
                              .sink = &sink};
    const Loop loop = chosen_loop();
    for (uint32_t pass = 0; pass < request_.num_passes; ++pass) {
      barrier_.arrive_and_wait();
      Pass& result = passes_[size_t{pass} * request_.num_threads + thread];
      result.begin = Clock::now();
      result.amount = loop(input, pass);
      result.end = Clock::now();
    }
  }

  Loop chosen_loop() const {
    if (request_.limit == Limit::kRead) return loops_.read;
    return request_.limit == Limit::kMultiply ? loops_.multiply : loops_.multiply_int8;
  }

  const Pass& at(uint32_t pass, uint32_t thread) const {
    return passes_[size_t{pass} * request_.num_threads + thread];
  }

  const LimitLoops& loops_;
  const LimitRequest request_;
  std::vector<Pages> pages_;  // one per thread for kRead, otherwise none
  std::barrier<> barrier_;
  std::vector<Pass> passes_;
  std::atomic<int> state_{kWaiting};
};

}  // namespace

Error measure_limit(const KernelTable& kernels, const LimitRequest& request, double* rates) {
  if (request.limit > Limit::kMultiplyInt8) return invalid("there is no such limit");
  if (request.num_threads == 0 || request.num_threads > 1024) return invalid("threads must be 1 to 1024");
  if (request.amount == 0 || request.num_passes == 0) return invalid("the amount and the passes must be at least 1");
  std::vector<Pages> pages;
  for (uint32_t thread = 0; request.limit == Limit::kRead && thread < request.num_threads; ++thread) {
    pages.emplace_back(share(request));
    if (!pages.back()) {
      return out_of_memory("no memory for a buffer of " + std::to_string(request.amount) + " bytes to read");
    }
  }
  Measurement measurement(*kernels.limits, request, std::move(pages));
  measurement.run();
  for (uint32_t pass = 0; pass < request.num_passes; ++pass) rates[pass] = measurement.rate(pass);
  return {};
}

}  // namespace llmserve
