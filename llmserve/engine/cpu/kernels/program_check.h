// Checks the op table of an engine file: operands inside their buffers, tensors of the right type and shape.
#pragma once

#include "error.h"

namespace llmserve {

class EngineFile;

Error check_program(const EngineFile& file);

}  // namespace llmserve
