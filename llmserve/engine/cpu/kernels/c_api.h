/* The library's complete C interface, loaded with ctypes. No exception crosses it; errors are a status and a text. */
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

/* Increases with every incompatible change of this interface or of its records. */
LLMSERVE_EXPORT uint32_t llmserve_abi_version(void);

/* Writes the names of the kernel variants that this processor supports, slowest first, separated by commas. */
LLMSERVE_EXPORT void llmserve_variants(char* text, size_t text_bytes);

/* Opens an engine. Returns null and an error, or an engine that the caller frees with `llmserve_close`. `variant` may
 * be "" (the fastest). `num_states`: states of sequences, if the network has any. `places`: see Engine::open. */
LLMSERVE_EXPORT llmserve::Engine* llmserve_open(const char* path, const char* variant, uint32_t num_blocks,
                                                uint32_t num_states, uint32_t num_threads, const llmserve::LayerPlace* places,
                                                size_t num_places, int* status, char* text, size_t text_bytes);

/* Sets a tactic per operation and row bucket (tactics.h), in order; only linear layers use it. Not during a step. */
LLMSERVE_EXPORT int llmserve_set_tactics(llmserve::Engine* engine, const uint8_t* tactics, size_t count, char* text,
                                         size_t text_bytes);

/* Copy a block's cached data, `num_bytes` in all, out of or into the cache. No running step may use the block. */
LLMSERVE_EXPORT int llmserve_read_block(const llmserve::Engine* engine, uint32_t block, void* data, size_t num_bytes,
                                        char* text, size_t text_bytes);
LLMSERVE_EXPORT int llmserve_write_block(llmserve::Engine* engine, uint32_t block, const void* data, size_t num_bytes,
                                         char* text, size_t text_bytes);

/* Copy a sequence's state, 0 to `num_states` - 1 (see `llmserve_open`), in the same way. */
LLMSERVE_EXPORT int llmserve_read_state(const llmserve::Engine* engine, uint32_t state, void* data, size_t num_bytes,
                                        char* text, size_t text_bytes);
LLMSERVE_EXPORT int llmserve_write_state(llmserve::Engine* engine, uint32_t state, const void* data, size_t num_bytes,
                                         char* text, size_t text_bytes);

/* Load a LoRA adapter into a free slot, counted from 1, and unload it (adapters.h). The caller keeps the matrices of
 * its `count` parts until the adapter is unloaded. Not during a step. */
LLMSERVE_EXPORT int llmserve_load_adapter(llmserve::Engine* engine, uint32_t slot, const llmserve::AdapterPartRecord* parts,
                                          size_t count, char* text, size_t text_bytes);
LLMSERVE_EXPORT int llmserve_unload_adapter(llmserve::Engine* engine, uint32_t slot, char* text, size_t text_bytes);

LLMSERVE_EXPORT void llmserve_close(llmserve::Engine* engine);

/* Runs one step; one caller at a time. Returns a status, 0 for success. */
LLMSERVE_EXPORT int llmserve_step(llmserve::Engine* engine, const llmserve::StepRecord* step, char* text,
                                  size_t text_bytes);

/* Sets a flag that a running step waits for: its masks are ready. */
LLMSERVE_EXPORT void llmserve_signal(uint32_t* flag);

/* Opens choosers, which turn logits computed elsewhere into tokens. Returns null and an error, or choosers to be freed
 * with `llmserve_close_choosers`. */
LLMSERVE_EXPORT llmserve::ChooserPool* llmserve_open_choosers(const char* variant, uint32_t vocab_size, uint32_t num_threads,
                                                              int* status, char* text, size_t text_bytes);

LLMSERVE_EXPORT void llmserve_close_choosers(llmserve::ChooserPool* choosers);

/* Answers a step's requests for the logits [num_rows, vocab_size] of its selected rows from `begin` on. Reads only
 * these requests of the step. One caller at a time. Returns a status. */
LLMSERVE_EXPORT int llmserve_choose(llmserve::ChooserPool* choosers, const llmserve::StepRecord* step, const float* logits,
                                    uint32_t begin, uint32_t num_rows, char* text, size_t text_bytes);

/* Writes the tactics of a variant for a weight type (format.h) and a number of rows, as "ROWSxVECTORS", separated by
 * commas; then a semicolon and the index of the default one. */
LLMSERVE_EXPORT int llmserve_tactics(const char* variant, uint32_t weight_type, uint32_t num_rows, char* text,
                                     size_t text_bytes);

/* Measures the seconds that one thread needs for a linear layer of this shape with each tactic. Returns a status. */
LLMSERVE_EXPORT int llmserve_time_tactics(const char* variant, uint32_t weight_type, uint32_t depth, uint32_t columns,
                                          uint32_t num_rows, uint32_t num_tactics, double* seconds, char* text,
                                          size_t text_bytes);

/* Measures what this machine does per second with a variant's instructions, once for each of `num_passes` entries of
 * `rates`. limit 0: bytes read from memory, `amount` per pass; 1 and 2: products of floats and of 8-bit integers,
 * summed in registers, `amount` rounds of a loop per pass. Returns a status. */
LLMSERVE_EXPORT int llmserve_measure(uint32_t limit, const char* variant, uint32_t num_threads, uint64_t amount,
                                     uint32_t num_passes, double* rates, char* text, size_t text_bytes);

#ifdef __cplusplus
}
#endif
