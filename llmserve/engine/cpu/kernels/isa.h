// The kernel variants that this processor supports.
#pragma once

#include <span>
#include <string_view>

#include "kernels.h"

namespace llmserve {

// The supported variants, slowest first. Never empty: the portable kernels run everywhere.
std::span<const KernelTable* const> available_kernels();

// Whether the `avx512` variant may use AMX's byte tiles: the processor has them, and the system permits this process.
bool has_amx();

// Returns the named variant, or the fastest if `name` is empty; null if this machine does not support it.
const KernelTable* find_kernels(std::string_view name);

}  // namespace llmserve
