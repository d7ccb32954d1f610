// Checks the op table of an engine file: operands must fit their buffers, tensors must have the right type and shape.
#pragma once

#include "error.h"

namespace llmserve {

class EngineFile;

Error check_program(const EngineFile& file);

}  // namespace llmserve
