#include "c_api.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "engine.h"
#include "isa.h"

namespace {

void copy_text(const std::string& source, char* text, size_t text_bytes) {
  if (text_bytes == 0) return;
  const size_t count = std::min(source.size(), text_bytes - 1);
  std::memcpy(text, source.data(), count);
  text[count] = '\0';
}

std::string variant_names() {
  std::string names;
  for (const llmserve::KernelTable* table : llmserve::available_kernels()) {
    if (!names.empty()) names += ',';
    names += table->name;
  }
  return names;
}

llmserve::Error open_engine(llmserve::Engine& engine, const char* path, const char* variant, uint32_t num_blocks,
                            uint32_t num_threads) {
  const llmserve::KernelTable* kernels = llmserve::find_kernels(variant);
  if (!kernels) {
    return llmserve::invalid(std::string("this machine has no kernels '") + variant + "'; it has " + variant_names());
  }
  if (num_threads == 0 || num_threads > 1024) return llmserve::invalid("threads must be 1 to 1024");
  return engine.open(path, *kernels, num_blocks, num_threads);
}

}  // namespace

extern "C" {

uint32_t llmserve_abi_version(void) { return 1; }

void llmserve_variants(char* text, size_t text_bytes) { copy_text(variant_names(), text, text_bytes); }

llmserve::Engine* llmserve_open(const char* path, const char* variant, uint32_t num_blocks, uint32_t num_threads,
                                int* status, char* text, size_t text_bytes) {
  try {
    auto engine = std::make_unique<llmserve::Engine>();
    const llmserve::Error error = open_engine(*engine, path, variant, num_blocks, num_threads);
    *status = static_cast<int>(error.status);
    if (!error) return engine.release();
    copy_text(error.text, text, text_bytes);
  } catch (const std::exception& error) {
    *status = static_cast<int>(llmserve::Status::kInternal);
    copy_text(error.what(), text, text_bytes);
  }
  return nullptr;
}

void llmserve_close(llmserve::Engine* engine) { delete engine; }

int llmserve_step(llmserve::Engine* engine, const llmserve::StepRecord* step, char* text, size_t text_bytes) {
  try {
    const llmserve::Error error = engine->step(*step);
    if (error) copy_text(error.text, text, text_bytes);
    return static_cast<int>(error.status);
  } catch (const std::exception& error) {
    copy_text(error.what(), text, text_bytes);
    return static_cast<int>(llmserve::Status::kInternal);
  }
}

}  // extern "C"
