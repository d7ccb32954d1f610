// Runs the steps of a test in another process, through the C API: with another library (other instruction sets, or
// sanitizers), or for another processor under emulation. Requests come from stdin, replies go to stdout; the other end
// is tests/engine/cpu/other_process.py.
// Usage: kernel_steps [ENGINE VARIANT BLOCKS THREADS VOCABULARY STATES]; without arguments it prints the variants.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "adapters.h"
#include "c_api.h"
#include "step.h"

namespace llmserve {
namespace {

enum class Kind : uint32_t { kStep, kSetTactics, kTactics, kLoadAdapter, kUnloadAdapter };

struct Request {
  Kind kind;
  uint32_t num_tokens, num_chunks, num_block_ids, num_selected, num_kept;  // kStep, and next line; adapter parts; rows
  uint32_t num_samples, num_scores, num_sample_ids, num_top, num_mask_words;
  uint32_t value;  // kSetTactics: number of tactics; kTactics: type of the weights; adapters: slot
};

// Matrices of loaded adapters by slot, each allocated separately, so that sanitizers find reads past its end.
using Matrices = std::vector<std::vector<std::byte>>;

template <class T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count > 0 && std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(EXIT_FAILURE);
  return values;
}

template <class T>
void write(const std::vector<T>& values) {
  if (!values.empty()) std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

void reply(int status, const std::string& text) {
  const uint32_t head[] = {static_cast<uint32_t>(status), static_cast<uint32_t>(text.size())};
  std::fwrite(head, sizeof(head), 1, stdout);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

void step(Engine* engine, const Request& r, size_t vocabulary) {
  const auto token_ids = read<int32_t>(r.num_tokens);
  const auto chunks = read<ChunkRecord>(r.num_chunks);
  const auto block_ids = read<int32_t>(r.num_block_ids);
  const auto selected = read<uint32_t>(r.num_selected);
  const auto kept = read<uint32_t>(r.num_kept);
  const auto samples = read<SampleRecord>(r.num_samples);
  const auto scores = read<ScoreRecord>(r.num_scores);
  const auto sample_ids = read<int32_t>(r.num_sample_ids);
  const auto mask_words = read<uint32_t>(r.num_mask_words);
  const std::vector<float> bias(r.num_sample_ids);
  std::vector<int32_t> tokens(r.num_samples);
  std::vector<int32_t> top_ids(r.num_top);
  std::vector<double> log_probs(r.num_samples), score_log_probs(r.num_scores), top_log_probs(r.num_top);
  std::vector<float> logits(r.num_kept * vocabulary);
  const StepRecord record = {
      .token_ids = token_ids.data(), .chunks = chunks.data(), .block_ids = block_ids.data(),
      .selected_rows = selected.data(), .kept_rows = kept.data(), .samples = samples.data(), .scores = scores.data(),
      .sample_ids = sample_ids.data(), .bias_values = bias.data(), .mask_words = mask_words.data(),
      .tokens = tokens.data(), .log_probs = log_probs.data(), .score_log_probs = score_log_probs.data(),
      .top_ids = top_ids.data(), .top_log_probs = top_log_probs.data(), .logits = logits.data(),
      .num_tokens = r.num_tokens, .num_chunks = r.num_chunks, .num_block_ids = r.num_block_ids,
      .num_selected = r.num_selected, .num_kept = r.num_kept, .num_samples = r.num_samples,
      .num_scores = r.num_scores, .num_sample_ids = r.num_sample_ids, .num_top = r.num_top,
      .num_mask_words = r.num_mask_words};
  char text[1024] = "";
  const int status = llmserve_step(engine, &record, text, sizeof(text));
  reply(status, text);
  if (status != 0) return;
  write(tokens);
  write(log_probs);
  write(score_log_probs);
  write(top_ids);
  write(top_log_probs);
  write(logits);
}

void load_adapter(Engine* engine, const Request& r, std::map<uint32_t, Matrices>& adapters) {
  auto parts = read<AdapterPartRecord>(r.num_tokens);
  const auto sizes = read<uint32_t>(2 * parts.size());
  Matrices matrices;
  for (const uint32_t size : sizes) matrices.push_back(read<std::byte>(size));
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].down = matrices[2 * i].data();
    parts[i].up = matrices[2 * i + 1].data();
  }
  char text[1024] = "";
  reply(llmserve_load_adapter(engine, r.value, parts.data(), parts.size(), text, sizeof(text)), text);
  adapters[r.value] = std::move(matrices);
}

void answer(Engine* engine, const char* variant, const Request& request, size_t vocabulary,
            std::map<uint32_t, Matrices>& adapters) {
  char text[1024] = "";
  if (request.kind == Kind::kLoadAdapter) return load_adapter(engine, request, adapters);
  if (request.kind == Kind::kUnloadAdapter) {
    reply(llmserve_unload_adapter(engine, request.value, text, sizeof(text)), text);
    adapters.erase(request.value);
    return;
  }
  if (request.kind == Kind::kStep) return step(engine, request, vocabulary);
  if (request.kind == Kind::kTactics) {
    return reply(llmserve_tactics(variant, request.value, request.num_tokens, text, sizeof(text)), text);
  }
  const auto tactics = read<uint8_t>(request.value);
  reply(llmserve_set_tactics(engine, tactics.data(), tactics.size(), text, sizeof(text)), text);
}

int run(char** arguments) {
  char text[1024] = "";
  int status = 0;
  const auto number = [](const char* digits) { return static_cast<uint32_t>(std::strtoul(digits, nullptr, 10)); };
  Engine* engine = llmserve_open(arguments[1], arguments[2], number(arguments[3]), number(arguments[6]),
                                 number(arguments[4]), nullptr, 0, &status, text, sizeof(text));
  reply(status, text);
  std::fflush(stdout);
  std::map<uint32_t, Matrices> adapters;
  for (Request request; engine && std::fread(&request, sizeof(request), 1, stdin) == 1;) {
    answer(engine, arguments[2], request, number(arguments[5]), adapters);
    std::fflush(stdout);
  }
  llmserve_close(engine);
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace llmserve

int main(int argc, char** argv) {
  if (argc == 7) return llmserve::run(argv);
  char names[1024];
  llmserve_variants(names, sizeof(names));
  std::puts(names);
  return argc == 1 ? EXIT_SUCCESS : EXIT_FAILURE;
}
