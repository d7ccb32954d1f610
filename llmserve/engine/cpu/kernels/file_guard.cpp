#include "file_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace llmserve {
namespace {

// Ranges are reused and never freed, because a handler may be reading any of them.
std::atomic<FileGuard::Range*> all_ranges = nullptr;
std::mutex changes;
struct sigaction previous = {};
uintptr_t page_bytes = 0;

FileGuard::Range* range_of(uintptr_t address) {
  for (FileGuard::Range* range = all_ranges.load(); range; range = range->next) {
    const uintptr_t begin = range->begin.load();
    if (begin != 0 && address >= begin && address - begin < range->bytes.load() && range->begin.load() == begin) return range;
  }
  return nullptr;
}

bool fill_with_zeros(uintptr_t address) {
  FileGuard::Range* range = range_of(address);
  if (!range) return false;
  range->lost.store(true);
  const uintptr_t page = address / page_bytes * page_bytes;
  const size_t bytes = range->begin.load() + range->bytes.load() - page;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(reinterpret_cast<void*>(page), bytes, PROT_READ, kFlags, -1, 0) != MAP_FAILED;
}

// Makes only calls that are a single system call, because it may run at any instruction.
void on_bus_error(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const bool is_fault = info->si_code > 0;  // not sent by a process
  if (is_fault && fill_with_zeros(reinterpret_cast<uintptr_t>(info->si_addr))) {
    errno = saved;
    return;
  }
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(number, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(number);
  sigaction(number, &previous, nullptr);
  if (!is_fault) raise(number);  // a fault occurs again by itself
}

void install_handler() {
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous);
}

}  // namespace

void FileGuard::watch(const Mapping& mapping) {
  const std::lock_guard lock(changes);
  static const bool installed = (install_handler(), true);
  (void)installed;
  Range* range = all_ranges.load();
  while (range && range->begin.load() != 0) range = range->next;
  if (!range) {
    range = new Range;
    range->next = all_ranges.load();
    all_ranges.store(range);
  }
  range->lost.store(false);
  range->bytes.store(mapping.size());
  range->begin.store(reinterpret_cast<uintptr_t>(mapping.data()));
  range_ = range;
}

FileGuard::~FileGuard() {
  if (range_) range_->begin.store(0);
}

}  // namespace llmserve
