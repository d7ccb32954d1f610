#include "isa.h"

#if defined(LLMSERVE_X86)
#include <cpuid.h>
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

// What the processor says about itself; nothing where it does not know the question.
Registers ask_processor(unsigned leaf, unsigned subleaf) {
  Registers r = {};
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

bool has_avx2() {
  constexpr unsigned kF16c = 1u << 29;  // not every compiler's __builtin_cpu_supports knows it
  __builtin_cpu_init();  // also asks whether the operating system saves the wide registers
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (ask_processor(1, 0).ecx & kF16c) != 0;
}

#if defined(LLMSERVE_HAS_AVX_VNNI)
bool has_avx_vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  return has_avx2() && (ask_processor(7, 1).eax & kAvxVnni) != 0;
}
#endif

bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(LLMSERVE_ARM)
bool has_dot_products() {
#if defined(__APPLE__)
  int has = 0;
  size_t bytes = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &bytes, nullptr, 0) == 0 && has != 0;
#else
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP, which some systems' headers do not have
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
#if defined(LLMSERVE_TESTS)
    {avx2_vnni_twin_kernels, has_avx512_vnni},
#endif
    {avx512_kernels, has_avx512_vnni},
#elif defined(LLMSERVE_ARM)
    {neon_kernels, has_dot_products},
#endif
};

}  // namespace

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables;
  for (const Variant& variant : kVariants) {
    if (variant.runs_here()) tables.push_back(&variant.kernels());
  }
  return tables;
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
