#include "isa.h"

#include <vector>

#if defined(LLMSERVE_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(LLMSERVE_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(LLMSERVE_ARM)
#include <sys/auxv.h>
#endif

namespace llmserve {
namespace {

bool always() { return true; }

#if defined(LLMSERVE_X86)
struct Registers {
  unsigned eax, ebx, ecx, edx;
};

// Reads a leaf of CPUID; zeros if the processor does not have it.
Registers ask_processor(unsigned leaf, unsigned subleaf) {
  Registers r = {};
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

constexpr bool has_all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

// Whether the operating system saves these registers (bits of XCR0) at context switches.
bool are_saved(unsigned registers) {
  constexpr unsigned kOsxsave = 1u << 27;
  if (!has_all(ask_processor(1, 0).ecx, kOsxsave)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return has_all(low, registers);
}

// Uses CPUID: __builtin_cpu_supports requires a run-time library that not every compiler provides.
bool has_avx2() {
  constexpr unsigned kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29, kAvx2 = 1u << 5;
  constexpr unsigned kUpTo256Bits = 0x06;
  return has_all(ask_processor(1, 0).ecx, kFma | kAvx | kF16c) && has_all(ask_processor(7, 0).ebx, kAvx2) &&
         are_saved(kUpTo256Bits);
}

#if defined(LLMSERVE_HAS_AVX_VNNI)
bool has_avx_vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  return has_avx2() && (ask_processor(7, 1).eax & kAvxVnni) != 0;
}
#endif

bool has_avx512_vnni() {
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31, kVnni = 1u << 11;
  constexpr unsigned kUpTo512Bits = 0xe6;
  const Registers extended = ask_processor(7, 0);
  return has_avx2() && has_all(extended.ebx, kF | kDq | kBw | kVl) && has_all(extended.ecx, kVnni) &&
         are_saved(kUpTo512Bits);
}
#endif

#if defined(LLMSERVE_ARM)
bool has_dot_products() {
#if defined(__APPLE__)
  int has = 0;
  size_t bytes = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &bytes, nullptr, 0) == 0 && has != 0;
#else
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP, which the headers of some systems lack
  return (getauxval(AT_HWCAP) & kDotProducts) != 0;
#endif
}
#endif

struct Variant {
  const KernelTable& (*kernels)();
  bool (*runs_here)();
};

constexpr Variant kVariants[] = {
    {portable_kernels, always},
#if defined(LLMSERVE_X86)
    {avx2_kernels, has_avx2},
#if defined(LLMSERVE_HAS_AVX_VNNI)
    {avx2_vnni_kernels, has_avx_vnni},
#endif
#if defined(LLMSERVE_HAS_TWIN)
    {avx2_vnni_twin_kernels, has_avx512_vnni},
#endif
    {avx512_kernels, has_avx512_vnni},
#elif defined(LLMSERVE_ARM)
    {neon_kernels, has_dot_products},
#endif
};

}  // namespace

bool has_amx() {
#if defined(LLMSERVE_X86) && defined(__linux__)
  static const bool has = [] {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kTileRegisters = 0x60000;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl: registers are large, so a process asks
    return has_all(ask_processor(7, 0).edx, kTile | kInt8) && are_saved(kTileRegisters) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return has;
#else
  return false;
#endif
}

std::span<const KernelTable* const> available_kernels() {
  // Determined once: on a virtual machine, each CPUID takes tens of microseconds.
  static const std::vector<const KernelTable*> known = [] {
    std::vector<const KernelTable*> tables;
    for (const Variant& variant : kVariants) {
      if (variant.runs_here()) tables.push_back(&variant.kernels());
    }
    return tables;
  }();
  return known;
}

const KernelTable* find_kernels(std::string_view name) {
  const auto tables = available_kernels();
  if (name.empty()) return tables.back();
  for (const KernelTable* table : tables) {
    if (name == table->name) return table;
  }
  return nullptr;
}

}  // namespace llmserve
