// Which kernel variants this processor can run.
#pragma once

#include <span>
#include <string_view>

#include "kernels.h"

namespace llmserve {

// Slowest first. Never empty: the portable kernels run everywhere.
std::span<const KernelTable* const> available_kernels();

// Whether `avx512` may use AMX's tiles of bytes: the processor has them, and the system lets this process.
bool has_amx();

// The named variant, or the fastest when `name` is empty; null when this machine does not have it.
const KernelTable* find_kernels(std::string_view name);

}  // namespace llmserve
