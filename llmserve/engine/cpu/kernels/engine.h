// An opened engine: the mapped file, its working memory, the paged cache and the threads. Runs one step at a time.
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

// A piece of attention work: some rows of one chunk, for one KV head.
struct AttentionTask {
  uint32_t chunk;
  uint32_t kv_head;
  uint32_t row_begin;
  uint32_t row_end;
  uint32_t part;  // of the queries that read the head
};

// Where a layer's keys and values are: in blocks of which table of a sequence, and in which part of each.
struct LayerPlace {
  uint32_t table;
  uint32_t part;
};

// Rows [begin, begin + count) of those of experts (RowsOf::kChosen) belong to one.
struct ExpertRows {
  uint32_t expert;
  uint32_t begin;
  uint32_t count;
};

// What kDispatch last found.
struct Dispatch {
  std::vector<ExpertRows> active;  // experts that have rows
  std::vector<uint32_t> ends;      // of the rows of each expert
  std::vector<uint32_t> tokens;    // of each row
  std::vector<uint32_t> rows;      // of each token: one for each of its experts
};

class Engine {
 public:
  // `num_states`: slots for states of sequences; of a network that has none, any number. `places`: of every layer; none:
  // a block has a part for each, and a sequence one table.
  Error open(const std::string& path, const KernelTable& kernels, uint32_t num_blocks, uint32_t num_states,
             std::span<const LayerPlace> places, unsigned num_threads);
  Error step(const StepRecord& step);

  // One per operation and row bucket; entries of other operations than linear layers are ignored.
  Error set_tactics(std::span<const uint8_t> tactics);

  // See Adapters. Not during a step.
  Error load_adapter(uint32_t slot, std::span<const AdapterPartRecord> parts);
  Error unload_adapter(uint32_t slot) { return adapters_.unload(slot); }

  // What the cache keeps of a block, all layers end to end: out of it, or into it. Not of blocks that a step uses.
  Error read_block(uint32_t block, std::span<std::byte> data) const;
  Error write_block(uint32_t block, std::span<const std::byte> data);
  // Likewise a state of a sequence.
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

  // One per op before the head; in each piece of the selected rows one per op from there on, and one for what wants its
  // logits.
  size_t num_counters(uint32_t num_selected) const;

  EngineFile file_;
  const KernelTable* kernels_ = nullptr;
  uint32_t num_blocks_ = 0;
  Mapping activations_;
  std::vector<size_t> buffer_offsets_;
  CacheShape cache_shape_ = {};  // of the largest layer
  std::vector<CacheShape> layer_shapes_;
  size_t most_kv_heads_ = 0;  // of a layer
  size_t most_queries_ = 0;   // that read one of them
  std::vector<LayerPlace> places_;  // of each layer
  uint32_t num_tables_ = 1;         // of each sequence
  uint32_t num_parts_ = 0;          // of each block
  Mapping cache_;  // [part][keys, values] planes
  size_t cache_plane_bytes_ = 0;
  uint32_t num_states_ = 0;
  size_t state_floats_ = 0;            // of a slot
  std::vector<size_t> state_offsets_;  // in a slot, per op
  Mapping states_;                     // [num_states_][state_floats_]
  Mapping logits_;   // [logits_rows_, output_width_]
  uint32_t output_width_ = 0;  // of the last operation: the vocabulary, unless it pools
  uint32_t num_segments_ = 0;
  uint32_t logits_rows_ = 0;
  size_t head_ = 0;  // the first op that writes logits: from there on, rows are worked off in pieces of logits_rows_
  Mapping scratch_;  // of each thread: what attention needs, or a row that is about to be quantized
  size_t scratch_floats_ = 0;
  std::vector<Chooser> choosers_;  // one per thread
  std::unique_ptr<TaskCounter[]> counters_;  // in the order of use: see num_counters
  Adapters adapters_;
  std::unique_ptr<TaskCounter[]> adapter_counters_;  // of each op before the head; from the first adapter on
  std::vector<uint8_t> tactics_;  // [op][row bucket]
  std::vector<int32_t> positions_;  // of each token of the step
  std::vector<int32_t> segments_;   // likewise
  std::vector<int32_t> slots_;      // [table][max_num_tokens], its row in the cache
  std::vector<AttentionTask> attention_tasks_;
  size_t attention_parts_ = 1;  // of the queries that read a head: more than one where there are fewer tasks than threads
  Dispatch dispatch_;
  std::unique_ptr<ThreadPool> threads_;
};

}  // namespace llmserve
