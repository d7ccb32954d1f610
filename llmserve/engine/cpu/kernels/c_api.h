/* The library's whole surface: plain C, loaded with ctypes. No exception leaves it; errors are a status and a text. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
namespace llmserve {
class ChooserPool;
class Engine;
struct AdapterPartRecord;
struct LayerPlace;
struct StepRecord;
}  // namespace llmserve
extern "C" {
#endif

#define LLMSERVE_EXPORT __attribute__((visibility("default")))

/* Grows with every incompatible change of this interface or of the records passed through it. */
LLMSERVE_EXPORT uint32_t llmserve_abi_version(void);

/* Names of the kernel variants that this processor can run, slowest first, separated by commas. */
LLMSERVE_EXPORT void llmserve_variants(char* text, size_t text_bytes);

/* Null and an error, or an engine that `llmserve_close` frees. `variant` may be "": the fastest.
 * `num_states`: of sequences, where the network has any. `places`: see Engine::open. */
LLMSERVE_EXPORT llmserve::Engine* llmserve_open(const char* path, const char* variant, uint32_t num_blocks,
                                                uint32_t num_states, uint32_t num_threads, const llmserve::LayerPlace* places,
                                                size_t num_places, int* status, char* text, size_t text_bytes);

/* One tactic per operation and row bucket (tactics.h), in order; what is no linear layer is ignored. Not during a step. */
LLMSERVE_EXPORT int llmserve_set_tactics(llmserve::Engine* engine, const uint8_t* tactics, size_t count, char* text,
                                         size_t text_bytes);

/* What the cache keeps of a block, `num_bytes` in all: out of it, and into it. Not of blocks that a step uses. */
LLMSERVE_EXPORT int llmserve_read_block(const llmserve::Engine* engine, uint32_t block, void* data, size_t num_bytes,
                                        char* text, size_t text_bytes);
LLMSERVE_EXPORT int llmserve_write_block(llmserve::Engine* engine, uint32_t block, const void* data, size_t num_bytes,
                                         char* text, size_t text_bytes);

/* Likewise a state of a sequence, of which there are as many as `llmserve_open` was told. */
LLMSERVE_EXPORT int llmserve_read_state(const llmserve::Engine* engine, uint32_t state, void* data, size_t num_bytes,
                                        char* text, size_t text_bytes);
LLMSERVE_EXPORT int llmserve_write_state(llmserve::Engine* engine, uint32_t state, const void* data, size_t num_bytes,
                                         char* text, size_t text_bytes);

/* A LoRA adapter into a free slot from 1 on, and out of it (adapters.h). The matrices of its `count` parts must stay where
 * they are until then. Not during a step. */
LLMSERVE_EXPORT int llmserve_load_adapter(llmserve::Engine* engine, uint32_t slot, const llmserve::AdapterPartRecord* parts,
                                          size_t count, char* text, size_t text_bytes);
LLMSERVE_EXPORT int llmserve_unload_adapter(llmserve::Engine* engine, uint32_t slot, char* text, size_t text_bytes);

LLMSERVE_EXPORT void llmserve_close(llmserve::Engine* engine);

/* Runs one step; one caller at a time. Returns a status, 0 for success. */
LLMSERVE_EXPORT int llmserve_step(llmserve::Engine* engine, const llmserve::StepRecord* step, char* text,
                                  size_t text_bytes);

/* Says that what `flag` stands for is done: of a step that runs, that its masks are ready. */
LLMSERVE_EXPORT void llmserve_signal(uint32_t* flag);

/* Null and an error, or what turns logits that were computed elsewhere into tokens; `llmserve_close_choosers` frees it. */
LLMSERVE_EXPORT llmserve::ChooserPool* llmserve_open_choosers(const char* variant, uint32_t vocab_size, uint32_t num_threads,
                                                              int* status, char* text, size_t text_bytes);

LLMSERVE_EXPORT void llmserve_close_choosers(llmserve::ChooserPool* choosers);

/* Answers what a step wants of the logits [num_rows, vocab_size] of its selected rows from `begin` on; of the step,
 * nothing but these requests is read. One caller at a time. Returns a status. */
LLMSERVE_EXPORT int llmserve_choose(llmserve::ChooserPool* choosers, const llmserve::StepRecord* step, const float* logits,
                                    uint32_t begin, uint32_t num_rows, char* text, size_t text_bytes);

/* The tactics of a variant for weights of a type (format.h) and so many rows, as "ROWSxVECTORS", separated by commas, and
 * behind a semicolon the number of the one that is taken when nothing was measured. */
LLMSERVE_EXPORT int llmserve_tactics(const char* variant, uint32_t weight_type, uint32_t num_rows, char* text,
                                     size_t text_bytes);

/* Seconds that one thread needs for a linear layer of this shape with each of its tactics. Returns a status. */
LLMSERVE_EXPORT int llmserve_time_tactics(const char* variant, uint32_t weight_type, uint32_t depth, uint32_t columns,
                                          uint32_t num_rows, uint32_t num_tactics, double* seconds, char* text,
                                          size_t text_bytes);

/* What this machine does per second with a variant's instructions, once for each of `num_passes` entries of `rates`.
 * limit 0: bytes read from memory, `amount` in a pass; 1 and 2: products of floats and of 8-bit integers added up in
 * registers, `amount` rounds of a loop in a pass. Returns a status. */
LLMSERVE_EXPORT int llmserve_measure(uint32_t limit, const char* variant, uint32_t num_threads, uint64_t amount,
                                     uint32_t num_passes, double* rates, char* text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
