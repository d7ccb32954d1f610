#include "isa.h"

namespace llmserve {

std::vector<const KernelTable*> available_kernels() {
  std::vector<const KernelTable*> tables{&portable_kernels()};
#ifdef LLMSERVE_X86
  __builtin_cpu_init();  // also asks whether the operating system saves the wide registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) tables.push_back(&avx2_kernels());
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) tables.push_back(&avx512_kernels());
#endif
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
