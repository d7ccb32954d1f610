#include "adapters.h"

#include <algorithm>
#include <string>

namespace llmserve {
namespace {

constexpr uint32_t kMostRows = 64;  // rows of a piece, whose inner numbers stay in a near cache

bool reads_integers(const OpRecord& op) { return static_cast<OpKind>(op.kind) != OpKind::kLinear; }

// `first`: the first part of the same operation.
Error check_part(const EngineFile& file, const AdapterPartRecord& part, const AdapterPartRecord& first) {
  const std::string name = "a matrix of the adapter, for operation " + std::to_string(part.op) + ", ";
  if (part.op >= file.ops().size() || !is_linear(static_cast<OpKind>(file.ops()[part.op].kind))) return invalid(name + "which is no linear layer");
  const OpRecord& op = file.ops()[part.op];
  if (op.rows != static_cast<uint32_t>(RowsOf::kTokens) || op.out.buffer == kLogitsBuffer) {
    return invalid(name + "whose rows are not those of tokens");
  }
  if (part.depth != op.in[0].width || part.columns == 0 || part.first_column % kPanelColumns != 0 ||
      uint64_t{part.first_column} + part.columns > op.out.width) {
    return invalid(name + "does not have its shape");
  }
  if (part.rank == 0 || part.rank > kMaxAdapterRank) return invalid(name + "has a rank of " + std::to_string(part.rank));
  if (part.dtype > static_cast<uint32_t>(DType::kBF16) || !part.down || !part.up) return invalid(name + "is not of floats");
  if (part.num_ranks > kMaxAdapterRanks || uint64_t{part.first_rank} + part.rank > part.num_ranks ||
      part.num_ranks != first.num_ranks || part.dtype != first.dtype) {
    return invalid(name + "does not fit the others of this operation");
  }
  return {};
}

}  // namespace

Error Adapters::load(const EngineFile& file, uint32_t slot, std::span<const AdapterPartRecord> parts) {
  if (slot == 0 || slot > kMaxAdapterSlots || find(slot)) {
    return invalid("slot " + std::to_string(slot) + " for adapters is not free");
  }
  auto adapter = std::make_unique<Adapter>();
  adapter->parts.assign(parts.begin(), parts.end());
  std::ranges::stable_sort(adapter->parts, {}, &AdapterPartRecord::op);
  const AdapterPartRecord* first = nullptr;
  for (const AdapterPartRecord& part : adapter->parts) {
    if (!first || first->op != part.op) first = &part;
    if (Error error = check_part(file, part, *first)) return error;
  }
  for (size_t op = 0, i = 0; op <= file.ops().size(); ++op) {
    while (i < adapter->parts.size() && adapter->parts[i].op < op) ++i;
    adapter->begins.push_back(static_cast<uint32_t>(i));
  }
  if (Error error = grow(file, *adapter)) return error;
  if (slots_.size() < slot) slots_.resize(slot);
  slots_[slot - 1] = std::move(adapter);
  return {};
}

// Enlarges the buffers to what a step with this adapter needs.
Error Adapters::grow(const EngineFile& file, const Adapter& adapter) {
  size_t inner = inner_width_, inputs = inputs_width_;
  for (const AdapterPartRecord& part : adapter.parts) {
    inner = std::max<size_t>(inner, part.num_ranks);
    if (reads_integers(file.ops()[part.op])) inputs = std::max<size_t>(inputs, part.depth);
  }
  const auto enlarge = [&](Mapping& room, size_t* width, size_t wanted) {
    if (wanted == *width) return true;
    Mapping larger = Mapping::anonymous(sizeof(float) * wanted * file.header().max_num_tokens);
    if (!larger.data()) return false;
    room = std::move(larger);
    *width = wanted;
    return true;
  };
  if (enlarge(inner_, &inner_width_, inner) && enlarge(inputs_, &inputs_width_, inputs)) return {};
  return out_of_memory("not enough memory for what adapters compute");
}

Error Adapters::unload(uint32_t slot) {
  if (!find(slot)) return invalid("no adapter is in slot " + std::to_string(slot));
  slots_[slot - 1].reset();
  return {};
}

Error Adapters::check(const StepRecord& step) const {
  for (uint32_t i = 0; i < step.num_chunks; ++i) {
    const uint32_t slot = step.chunks[i].adapter;
    if (slot != 0 && !find(slot)) return invalid("no adapter is in slot " + std::to_string(slot));
  }
  return {};
}

void Adapters::prepare(const StepRecord& step) {
  rows_.clear();
  for (uint32_t i = 0; i < step.num_chunks; ++i) {
    const ChunkRecord& chunk = step.chunks[i];
    const Adapter* adapter = find(chunk.adapter);
    if (!adapter) continue;
    for (uint32_t row = 0; row < chunk.num_tokens;) {
      const uint32_t begin = chunk.first_token + row;
      const bool follows = !rows_.empty() && rows_.back().adapter == adapter && rows_.back().begin + rows_.back().count == begin;
      if (!follows || rows_.back().count == kMostRows) rows_.push_back({adapter, begin, 0});
      const uint32_t count = std::min(chunk.num_tokens - row, kMostRows - rows_.back().count);
      rows_.back().count += count;
      row += count;
    }
  }
}

}  // namespace llmserve
