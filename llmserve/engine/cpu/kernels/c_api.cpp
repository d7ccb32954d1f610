#include "c_api.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "choosing.h"
#include "engine.h"
#include "isa.h"
#include "tactics.h"

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

llmserve::Error find_variant(const char* name, const llmserve::KernelTable** kernels) {
  *kernels = llmserve::find_kernels(name);
  if (*kernels) return {};
  return llmserve::invalid(std::string("this machine has no kernels '") + name + "'; it has " + variant_names());
}

llmserve::Error check_threads(uint32_t num_threads) {
  return num_threads == 0 || num_threads > 1024 ? llmserve::invalid("threads must be 1 to 1024") : llmserve::Error{};
}

llmserve::Error open_engine(llmserve::Engine& engine, const char* path, const char* variant, uint32_t num_blocks,
                            uint32_t num_states, std::span<const llmserve::LayerPlace> places, uint32_t num_threads) {
  const llmserve::KernelTable* kernels = nullptr;
  if (llmserve::Error error = find_variant(variant, &kernels)) return error;
  if (llmserve::Error error = check_threads(num_threads)) return error;
  return engine.open(path, *kernels, num_blocks, num_states, places, num_threads);
}

llmserve::Error open_choosers(const char* variant, uint32_t vocab_size, uint32_t num_threads,
                              std::unique_ptr<llmserve::ChooserPool>* choosers) {
  const llmserve::KernelTable* kernels = nullptr;
  if (llmserve::Error error = find_variant(variant, &kernels)) return error;
  if (llmserve::Error error = check_threads(num_threads)) return error;
  if (vocab_size == 0) return llmserve::invalid("a vocabulary has at least one token");
  *choosers = std::make_unique<llmserve::ChooserPool>(*kernels, vocab_size, num_threads);
  return {};
}

llmserve::Error describe_tactics(const char* variant, uint32_t weight_type, uint32_t num_rows, std::string* text) {
  const llmserve::KernelTable* kernels = nullptr;
  if (llmserve::Error error = find_variant(variant, &kernels)) return error;
  const uint32_t bucket = llmserve::row_bucket(num_rows);
  const auto tactics = llmserve::tactics_for(*kernels, static_cast<llmserve::DType>(weight_type), bucket);
  if (tactics.empty()) return llmserve::invalid("linear layers have no weights of this type");
  for (const llmserve::LinearTactic& tactic : tactics) {
    if (!text->empty()) *text += ',';
    *text += std::to_string(tactic.max_rows) + 'x' + std::to_string(tactic.vectors);
    *text += tactic.blocked ? " blocked" : tactic.amx ? " amx" : "";
  }
  *text += ';' + std::to_string(llmserve::default_tactic(tactics, bucket));
  return {};
}

llmserve::Error time_tactics(const char* variant, const llmserve::LinearTrial& trial, std::span<double> seconds) {
  constexpr size_t kMost = 1 << 16;
  const llmserve::KernelTable* kernels = nullptr;
  if (llmserve::Error error = find_variant(variant, &kernels)) return error;
  const uint32_t bucket = llmserve::row_bucket(trial.num_rows);
  const auto in_range = [](size_t value) { return value >= 1 && value <= kMost; };
  if (!in_range(trial.depth) || !in_range(trial.columns) || !in_range(trial.num_rows) ||
      seconds.empty() || seconds.size() != llmserve::tactics_for(*kernels, trial.weight_type, bucket).size()) {
    return llmserve::invalid("a trial of a linear layer that cannot be");
  }
  llmserve::time_linear(*kernels, trial, seconds);
  return {};
}

llmserve::Error measure(const char* variant, const llmserve::LimitRequest& request, double* rates) {
  const llmserve::KernelTable* kernels = nullptr;
  if (llmserve::Error error = find_variant(variant, &kernels)) return error;
  return llmserve::measure_limit(*kernels, request, rates);
}

// Runs `body`, which returns an Error; no exception leaves.
template <class Body>
int guarded(char* text, size_t text_bytes, Body body) {
  try {
    const llmserve::Error error = body();
    if (error) copy_text(error.text, text, text_bytes);
    return static_cast<int>(error.status);
  } catch (const std::exception& error) {
    copy_text(error.what(), text, text_bytes);
    return static_cast<int>(llmserve::Status::kInternal);
  }
}

}  // namespace

extern "C" {

uint32_t llmserve_abi_version(void) { return 15; }

void llmserve_variants(char* text, size_t text_bytes) { copy_text(variant_names(), text, text_bytes); }

llmserve::Engine* llmserve_open(const char* path, const char* variant, uint32_t num_blocks, uint32_t num_states,
                                uint32_t num_threads, const llmserve::LayerPlace* places, size_t num_places, int* status,
                                char* text, size_t text_bytes) {
  std::unique_ptr<llmserve::Engine> engine;
  *status = guarded(text, text_bytes, [&] {
    engine = std::make_unique<llmserve::Engine>();
    return open_engine(*engine, path, variant, num_blocks, num_states, {places, num_places}, num_threads);
  });
  return *status == 0 ? engine.release() : nullptr;
}

void llmserve_close(llmserve::Engine* engine) { delete engine; }

int llmserve_step(llmserve::Engine* engine, const llmserve::StepRecord* step, char* text, size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return engine->step(*step); });
}

void llmserve_signal(uint32_t* flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

int llmserve_set_tactics(llmserve::Engine* engine, const uint8_t* tactics, size_t count, char* text,
                         size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return engine->set_tactics({tactics, count}); });
}

int llmserve_read_block(const llmserve::Engine* engine, uint32_t block, void* data, size_t num_bytes, char* text,
                        size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return engine->read_block(block, {static_cast<std::byte*>(data), num_bytes}); });
}

int llmserve_write_block(llmserve::Engine* engine, uint32_t block, const void* data, size_t num_bytes, char* text,
                         size_t text_bytes) {
  return guarded(text, text_bytes,
                 [&] { return engine->write_block(block, {static_cast<const std::byte*>(data), num_bytes}); });
}

int llmserve_read_state(const llmserve::Engine* engine, uint32_t state, void* data, size_t num_bytes, char* text,
                        size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return engine->read_state(state, {static_cast<std::byte*>(data), num_bytes}); });
}

int llmserve_write_state(llmserve::Engine* engine, uint32_t state, const void* data, size_t num_bytes, char* text,
                         size_t text_bytes) {
  return guarded(text, text_bytes,
                 [&] { return engine->write_state(state, {static_cast<const std::byte*>(data), num_bytes}); });
}

int llmserve_load_adapter(llmserve::Engine* engine, uint32_t slot, const llmserve::AdapterPartRecord* parts, size_t count,
                          char* text, size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return engine->load_adapter(slot, {parts, count}); });
}

int llmserve_unload_adapter(llmserve::Engine* engine, uint32_t slot, char* text, size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return engine->unload_adapter(slot); });
}

llmserve::ChooserPool* llmserve_open_choosers(const char* variant, uint32_t vocab_size, uint32_t num_threads, int* status,
                                              char* text, size_t text_bytes) {
  std::unique_ptr<llmserve::ChooserPool> choosers;
  *status = guarded(text, text_bytes, [&] { return open_choosers(variant, vocab_size, num_threads, &choosers); });
  return *status == 0 ? choosers.release() : nullptr;
}

void llmserve_close_choosers(llmserve::ChooserPool* choosers) { delete choosers; }

int llmserve_choose(llmserve::ChooserPool* choosers, const llmserve::StepRecord* step, const float* logits, uint32_t begin,
                    uint32_t num_rows, char* text, size_t text_bytes) {
  return guarded(text, text_bytes, [&] { return choosers->choose(*step, logits, begin, num_rows); });
}

int llmserve_tactics(const char* variant, uint32_t weight_type, uint32_t num_rows, char* text, size_t text_bytes) {
  return guarded(text, text_bytes, [&] {
    std::string description;
    llmserve::Error error = describe_tactics(variant, weight_type, num_rows, &description);
    if (!error) copy_text(description, text, text_bytes);
    return error;
  });
}

int llmserve_time_tactics(const char* variant, uint32_t weight_type, uint32_t depth, uint32_t columns,
                          uint32_t num_rows, uint32_t num_tactics, double* seconds, char* text, size_t text_bytes) {
  const llmserve::LinearTrial trial = {static_cast<llmserve::DType>(weight_type), depth, columns, num_rows};
  return guarded(text, text_bytes, [&] { return time_tactics(variant, trial, {seconds, num_tactics}); });
}

int llmserve_measure(uint32_t limit, const char* variant, uint32_t num_threads, uint64_t amount, uint32_t num_passes,
                     double* rates, char* text, size_t text_bytes) {
  const llmserve::LimitRequest request = {llmserve::Limit{limit}, num_threads, amount, num_passes};
  return guarded(text, text_bytes, [&] { return measure(variant, request, rates); });
}

}  // extern "C"
