#include "engine.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>

#include "executor.h"

namespace llmserve {
namespace {

constexpr uint32_t kAttentionRows = 16;  // rows of a task
constexpr uint32_t kLogitsRows = 64;     // at least; with fewer, a prompt with log-probs would read the head too often

bool multiply(size_t a, size_t b, size_t* out) { return !__builtin_mul_overflow(a, b, out); }

}  // namespace

Error Engine::open(const std::string& path, const KernelTable& kernels, uint32_t num_blocks, uint32_t num_states,
                   std::span<const LayerPlace> places, unsigned num_threads) {
  if (Error error = file_.open(path)) return error;
  if (Error error = place_layers(places)) return error;
  const uint32_t most_blocks = std::numeric_limits<int32_t>::max() / file_.header().block_size;
  if (num_blocks == 0 || num_blocks > most_blocks) {
    return invalid("the number of KV blocks must be 1 to " + std::to_string(most_blocks));
  }
  kernels_ = &kernels;
  num_blocks_ = num_blocks;
  num_states_ = num_states;
  try {
    threads_ = std::make_unique<ThreadPool>(num_threads);
    choose_default_tactics();
    if (Error error = allocate_states()) return error;
    return allocate();
  } catch (const std::bad_alloc&) {
    return out_of_memory("not enough memory for the working buffers");
  } catch (const std::system_error& error) {
    return {Status::kInternal, std::string("cannot start threads: ") + error.what()};
  }
}

Error Engine::allocate() {
  const FileHeader& h = file_.header();
  size_t total = 0;
  for (const BufferRecord& buffer : file_.buffers()) {
    buffer_offsets_.push_back(total);
    total += buffer.bytes_per_row * h.max_num_tokens;
  }
  activations_ = Mapping::anonymous(total);
  logits_rows_ = std::max(h.max_batch_size, std::min(h.max_num_tokens, kLogitsRows));  // uses memory only when touched
  output_width_ = file_.ops().back().out.width;
  pools_ = std::ranges::find(file_.ops(), static_cast<uint32_t>(OpKind::kPool), &OpRecord::kind) != file_.ops().end();
  logits_ = Mapping::anonymous(sizeof(float) * logits_rows_ * output_width_);
  const auto writes_logits = [](const OpRecord& op) { return op.out.buffer == kLogitsBuffer; };
  head_ = static_cast<size_t>(std::ranges::find_if(file_.ops(), writes_logits) - file_.ops().begin());
  cache_shape_ = file_.cache_shape();
  layer_shapes_.assign(h.num_layers, cache_shape_);
  size_t head_dim = h.head_dim;
  for (uint32_t layer = 0; layer < h.num_layers; ++layer) {
    if (const OpRecord* write = file_.cache_write(layer)) layer_shapes_[layer] = file_.cache_shape(*write);
    head_dim = std::max(head_dim, layer_shapes_[layer].head_dim);
    most_kv_heads_ = std::max(most_kv_heads_, layer_shapes_[layer].num_kv_heads);
  }
  scratch_floats_ = cache_shape_.has_integers() ? attention_int8_scratch(head_dim)
                                                : attention_scratch(h.max_seq_len, head_dim);
  for (const OpRecord& op : file_.ops()) {
    if (op.kind == static_cast<uint32_t>(OpKind::kDispatch)) dispatch_.ends.resize(op.groups);
    if (op.kind == static_cast<uint32_t>(OpKind::kAttention)) {
      most_queries_ = std::max(most_queries_, op.num_heads / layer_shapes_[op.layer].num_kv_heads);
    }
    if (op.kind == static_cast<uint32_t>(OpKind::kEmbedSegment)) num_segments_ = file_.record(op.tensors[0]).rows;
    if (op.before != 0) scratch_floats_ = std::max<size_t>(scratch_floats_, attention_row_floats(op.out.width));
  }
  scratch_ = Mapping::anonymous(sizeof(float) * scratch_floats_ * threads_->size());
  if (!activations_.data() || !logits_.data() || !scratch_.data()) {
    return out_of_memory("not enough memory for the working buffers (" + std::to_string(total) +
                         " bytes); build the engine with a smaller max_num_tokens or max_batch_size");
  }
  size_t cache_bytes = 0;
  if (!multiply(cache_shape_.block_bytes(), num_blocks_, &cache_plane_bytes_) ||
      !multiply(cache_plane_bytes_, size_t{2} * num_parts_, &cache_bytes)) {
    return out_of_memory("the KV cache is larger than the address space; lower the number of blocks");
  }
  cache_ = Mapping::anonymous(cache_bytes);
  if (!cache_.data()) {
    return out_of_memory("not enough memory for a KV cache of " + std::to_string(cache_bytes) +
                         " bytes; lower the number of blocks");
  }
  for (unsigned i = 0; i < threads_->size(); ++i) {
    choosers_.emplace_back(*kernels_, output_width_);
  }
  counters_ = std::make_unique<TaskCounter[]>(num_counters(h.max_num_tokens));
  positions_.resize(h.max_num_tokens);
  segments_.resize(h.max_num_tokens);
  slots_.resize(size_t{num_tables_} * h.max_num_tokens);
  dispatch_.active.reserve(dispatch_.ends.size());
  dispatch_.tokens.resize(size_t{h.max_num_tokens} * h.experts_per_token);
  dispatch_.rows.resize(dispatch_.tokens.size());
  return {};
}

Error Engine::place_layers(std::span<const LayerPlace> places) {
  const uint32_t num_layers = file_.header().num_layers;
  places_.assign(places.begin(), places.end());
  for (uint32_t layer = 0; places.empty() && layer < num_layers; ++layer) places_.push_back({0, layer});
  if (places_.size() != num_layers) {
    return invalid("the engine has " + std::to_string(num_layers) + " layers, got " + std::to_string(places_.size()));
  }
  for (const LayerPlace& place : places_) {
    if (place.table >= num_layers || place.part >= num_layers) return invalid("a layer has no place in the cache");
    num_tables_ = std::max(num_tables_, place.table + 1);
    num_parts_ = std::max(num_parts_, place.part + 1);
  }
  return {};
}

Error Engine::allocate_states() {
  for (const OpRecord& op : file_.ops()) {
    state_offsets_.push_back(state_floats_);
    state_floats_ += state_floats(op);
  }
  if (state_floats_ == 0) {
    num_states_ = 0;
    return {};
  }
  size_t num_bytes = 0;
  if (num_states_ == 0) return invalid("the number of states must be at least 1");
  if (multiply(sizeof(float) * num_states_, state_floats_, &num_bytes)) states_ = Mapping::anonymous(num_bytes);
  if (states_.data()) return {};
  return out_of_memory("not enough memory for " + std::to_string(num_states_) + " states of " +
                       std::to_string(sizeof(float) * state_floats_) + " bytes; lower their number");
}

// Empty for an operation without tactics.
std::span<const LinearTactic> Engine::tactics_of(size_t index, uint32_t bucket) const {
  const OpRecord& op = file_.ops()[index];
  if (!is_linear(static_cast<OpKind>(op.kind))) return {};
  return tactics_for(*kernels_, static_cast<DType>(file_.record(op.tensors[0]).dtype), bucket);
}

void Engine::choose_default_tactics() {
  tactics_.assign(file_.ops().size() * kRowBuckets, 0);
  for (size_t i = 0; i < file_.ops().size(); ++i) {
    for (uint32_t bucket = 0; bucket < kRowBuckets; ++bucket) {
      tactics_[i * kRowBuckets + bucket] = static_cast<uint8_t>(default_tactic(tactics_of(i, bucket), bucket));
    }
  }
}

Error Engine::set_tactics(std::span<const uint8_t> tactics) {
  if (tactics.size() != tactics_.size()) {
    return invalid("the engine has " + std::to_string(tactics_.size()) + " tactics, got " +
                   std::to_string(tactics.size()));
  }
  for (size_t i = 0; i < tactics.size(); ++i) {
    const auto known = tactics_of(i / kRowBuckets, i % kRowBuckets);
    if (!known.empty() && tactics[i] >= known.size()) {
      return invalid("operation " + std::to_string(i / kRowBuckets) + " has no tactic " + std::to_string(tactics[i]));
    }
  }
  std::copy(tactics.begin(), tactics.end(), tactics_.begin());
  return {};
}

Error Engine::check_block(uint32_t block, size_t num_bytes) const {
  const size_t expected = size_t{2} * num_parts_ * cache_shape_.block_bytes();
  if (block >= num_blocks_ || num_bytes != expected) {
    return invalid("block " + std::to_string(block) + " of " + std::to_string(num_blocks_) + " has " +
                   std::to_string(expected) + " bytes, not " + std::to_string(num_bytes));
  }
  return {};
}

Error Engine::read_block(uint32_t block, std::span<std::byte> data) const {
  if (Error error = check_block(block, data.size())) return error;
  const size_t size = cache_shape_.block_bytes();
  for (size_t plane = 0; plane < data.size() / size; ++plane) {
    std::memcpy(data.data() + plane * size, cache_.data() + plane * cache_plane_bytes_ + block * size, size);
  }
  return {};
}

Error Engine::write_block(uint32_t block, std::span<const std::byte> data) {
  if (Error error = check_block(block, data.size())) return error;
  const size_t size = cache_shape_.block_bytes();
  for (size_t plane = 0; plane < data.size() / size; ++plane) {
    std::memcpy(cache_.data() + plane * cache_plane_bytes_ + block * size, data.data() + plane * size, size);
  }
  return {};
}

Error Engine::check_state(uint32_t state, size_t num_bytes) const {
  const size_t expected = sizeof(float) * state_floats_;
  if (state >= num_states_ || num_bytes != expected) {
    return invalid("state " + std::to_string(state) + " of " + std::to_string(num_states_) + " has " +
                   std::to_string(expected) + " bytes, not " + std::to_string(num_bytes));
  }
  return {};
}

Error Engine::read_state(uint32_t state, std::span<std::byte> data) const {
  if (Error error = check_state(state, data.size())) return error;
  std::memcpy(data.data(), states_.data() + state * data.size(), data.size());
  return {};
}

Error Engine::write_state(uint32_t state, std::span<const std::byte> data) {
  if (Error error = check_state(state, data.size())) return error;
  std::memcpy(states_.data() + state * data.size(), data.data(), data.size());
  return {};
}

Error Engine::load_adapter(uint32_t slot, std::span<const AdapterPartRecord> parts) {
  if (!adapter_counters_) adapter_counters_ = std::make_unique<TaskCounter[]>(head_);
  return adapters_.load(file_, slot, parts);
}

// Checks that the step has hidden rows if and only if the program reads them. To hand out rows, a program must have an
// RMS norm between row selection and head.
Error Engine::check_hidden(const StepRecord& step) const {
  const auto ops = file_.ops();
  const auto reader = std::ranges::find(ops, static_cast<uint32_t>(OpKind::kWithHidden), &OpRecord::kind);
  const uint64_t read = reader == ops.end() ? 0 : reader->out.width - reader->in[0].width;
  if (read != (step.hidden ? step.hidden_width : 0)) {
    return invalid("a step needs hidden rows of " + std::to_string(read) + " numbers: no more, no fewer");
  }
  if (!step.hidden_out) return {};
  const auto is = [&](size_t before, OpKind kind) {
    return head_ >= before && ops[head_ - before].kind == static_cast<uint32_t>(kind);
  };
  const bool has_norm = (is(1, OpKind::kRmsNorm) && ops[head_ - 1].groups == 1) ||
                        (is(1, OpKind::kQuantize) && ops[head_ - 1].before == static_cast<uint32_t>(Before::kRmsNorm));
  if (is(2, OpKind::kSelectRows) && has_norm && ops[head_ - 2].out.width == step.hidden_width) return {};
  return invalid("the engine's head reads no rows of " + std::to_string(step.hidden_width) + " numbers behind an RMS norm");
}

Error Engine::step(const StepRecord& step) {
  const uint32_t num_logits = pools_ ? file_.header().vocab_size : output_width_;
  if (Error error = check_step(step, file_.header(), num_logits, {num_blocks_, num_states_, num_tables_})) return error;
  if (pools_ && step.num_samples + step.num_scores > 0) {
    return invalid("a step wants tokens of an engine that pools");
  }
  if (Error error = adapters_.check(step)) return error;
  if (Error error = check_hidden(step)) return error;
  try {
    prepare(step);
  } catch (const std::bad_alloc&) {
    return out_of_memory("not enough memory for the step");
  }
  threads_->run([&](unsigned thread) { Executor(*this, step, thread).run(); });
  return file_.check_whole();
}

size_t Engine::num_counters(uint32_t num_selected) const {
  const size_t num_pieces = (size_t{num_selected} + logits_rows_ - 1) / logits_rows_;
  return head_ + num_pieces * (file_.ops().size() - head_ + 1);
}

void Engine::prepare(const StepRecord& step) {
  const FileHeader& h = file_.header();
  for (size_t i = 0; i < num_counters(step.num_selected); ++i) counters_[i].reset(threads_->spins());
  adapters_.prepare(step);
  if (!adapters_.rows().empty()) {
    for (size_t i = 0; i < head_; ++i) adapter_counters_[i].reset(threads_->spins());
  }
  attention_tasks_.clear();
  for (uint32_t c = 0; c < step.num_chunks; ++c) {
    const ChunkRecord& chunk = step.chunks[c];
    const int32_t* blocks = step.block_ids + chunk.first_block;
    for (uint32_t i = 0; i < chunk.num_tokens; ++i) {
      const uint32_t position = chunk.start + i;
      positions_[chunk.first_token + i] = static_cast<int32_t>(position);
      const bool second = num_segments_ > 1 && chunk.second_segment > 0 && position >= chunk.second_segment;
      segments_[chunk.first_token + i] = second ? 1 : 0;
      for (uint32_t table = 0; table < num_tables_; ++table) {
        const auto block = static_cast<uint32_t>(blocks[table * chunk.num_blocks + position / h.block_size]);
        const uint32_t row = block * h.block_size + position % h.block_size;
        slots_[size_t{table} * h.max_num_tokens + chunk.first_token + i] = static_cast<int32_t>(row);
      }
    }
    for (uint32_t head = 0; head < most_kv_heads_; ++head) {
      for (uint32_t row = 0; row < chunk.num_tokens; row += kAttentionRows) {
        attention_tasks_.push_back({c, head, row, std::min(row + kAttentionRows, chunk.num_tokens), 0});
      }
    }
  }
  const size_t whole = attention_tasks_.size(), wanted = whole ? (threads_->size() + whole - 1) / whole : 1;
  attention_parts_ = std::max<size_t>(std::min(wanted, most_queries_ / kMaxQueryTile), 1);
  for (uint32_t part = 1; part < attention_parts_; ++part) {
    for (size_t i = 0; i < whole; ++i) {
      attention_tasks_.push_back(attention_tasks_[i]);
      attention_tasks_.back().part = part;
    }
  }
}

}  // namespace llmserve
