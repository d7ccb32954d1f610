// An open engine: the mapped file, its working memory, the paged cache and the threads. Runs one step at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "adapters.h"
#include "choosing.h"
#include "engine_file.h"
#include "kernels.h"
#include "memory.h"
#include "step.h"
#include "tactics.h"
#include "thread_pool.h"

namespace llmserve {

// A task of attention: some rows of one chunk, for one KV head.
struct AttentionTask {
  uint32_t chunk;
  uint32_t kv_head;
  uint32_t row_begin;
  uint32_t row_end;
  uint32_t part;  // part of the query heads that share the KV head
};

// Location of a layer's keys and values: a table of the sequence, whose blocks it uses, and a part of each block.
struct LayerPlace {
  uint32_t table;
  uint32_t part;
};

// Rows [begin, begin + count) of RowsOf::kChosen belong to `expert`.
struct ExpertRows {
  uint32_t expert;
  uint32_t begin;
  uint32_t count;
};

// Result of the last kDispatch.
struct Dispatch {
  std::vector<ExpertRows> active;  // the experts that have rows
  std::vector<uint32_t> ends;      // end of each expert's rows
  std::vector<uint32_t> tokens;    // the token of each row
  std::vector<uint32_t> rows;      // the rows of each token, one for each of its experts
};

class Engine {
 public:
  // `num_states`: slots for states of sequences; ignored if the network has none. `places`: one per layer; if empty, a
  // block has a part for each layer, and a sequence one table.
  Error open(const std::string& path, const KernelTable& kernels, uint32_t num_blocks, uint32_t num_states,
             std::span<const LayerPlace> places, unsigned num_threads);
  Error step(const StepRecord& step);

  // One tactic per operation and row bucket. Entries of operations other than linear layers are ignored.
  Error set_tactics(std::span<const uint8_t> tactics);

  // See Adapters. Not during a step.
  Error load_adapter(uint32_t slot, std::span<const AdapterPartRecord> parts);
  Error unload_adapter(uint32_t slot) { return adapters_.unload(slot); }

  // Copy a block's cached data, all layers one after the other, out of or into the cache. No step may be using it.
  Error read_block(uint32_t block, std::span<std::byte> data) const;
  Error write_block(uint32_t block, std::span<const std::byte> data);
  // The same for a state of a sequence.
  Error read_state(uint32_t state, std::span<std::byte> data) const;
  Error write_state(uint32_t state, std::span<const std::byte> data);

 private:
  friend class Executor;

  Error allocate();
  Error allocate_states();
  Error place_layers(std::span<const LayerPlace> places);
  Error check_block(uint32_t block, size_t num_bytes) const;
  Error check_state(uint32_t state, size_t num_bytes) const;
  Error check_hidden(const StepRecord& step) const;
  void choose_default_tactics();
  std::span<const LinearTactic> tactics_of(size_t index, uint32_t bucket) const;
  void prepare(const StepRecord& step);

  // One counter per op before the head. For each piece of the selected rows, one per op from the head on, and one for
  // the requests for its logits.
  size_t num_counters(uint32_t num_selected) const;

  EngineFile file_;
  const KernelTable* kernels_ = nullptr;
  uint32_t num_blocks_ = 0;
  Mapping activations_;
  std::vector<size_t> buffer_offsets_;
  CacheShape cache_shape_ = {};  // shape of the largest layer
  std::vector<CacheShape> layer_shapes_;
  size_t most_kv_heads_ = 0;  // the most KV heads of a layer
  size_t most_queries_ = 0;   // the most query heads that share a KV head
  std::vector<LayerPlace> places_;  // one per layer
  uint32_t num_tables_ = 1;         // tables of a sequence
  uint32_t num_parts_ = 0;          // parts of a block
  Mapping cache_;  // [part][keys, values] planes
  size_t cache_plane_bytes_ = 0;
  uint32_t num_states_ = 0;
  size_t state_floats_ = 0;            // floats of a slot
  std::vector<size_t> state_offsets_;  // offset in a slot, per op
  Mapping states_;                     // [num_states_][state_floats_]
  Mapping logits_;   // [logits_rows_, output_width_]
  uint32_t output_width_ = 0;  // width of the last operation: tokens of the head, unless it pools
  bool pools_ = false;
  uint32_t num_segments_ = 0;
  uint32_t logits_rows_ = 0;
  size_t head_ = 0;  // the first op that writes logits; from it on, rows are processed in pieces of logits_rows_
  Mapping scratch_;  // per thread: scratch of attention, or a row before quantization
  size_t scratch_floats_ = 0;
  std::vector<Chooser> choosers_;  // one per thread
  std::unique_ptr<TaskCounter[]> counters_;  // in order of use, see num_counters
  Adapters adapters_;
  std::unique_ptr<TaskCounter[]> adapter_counters_;  // one per op before the head; null before the first adapter
  std::vector<uint8_t> tactics_;  // [op][row bucket]
  std::vector<int32_t> positions_;  // position of each token of the step
  std::vector<int32_t> segments_;   // segment of each token
  std::vector<int32_t> slots_;      // [table][max_num_tokens]: the row of each token in the cache
  std::vector<AttentionTask> attention_tasks_;
  size_t attention_parts_ = 1;  // parts of a KV head's query heads: several if there are fewer tasks than threads
  Dispatch dispatch_;
  std::unique_ptr<ThreadPool> threads_;
};

}  // namespace llmserve
