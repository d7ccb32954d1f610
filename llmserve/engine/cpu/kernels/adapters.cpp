#include "adapters.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace llmserve {
namespace {

constexpr uint32_t kMostRows = 64;  // of a piece: their inner numbers stay in a near cache

bool is_linear(const OpRecord& op) {
  const auto kind = static_cast<OpKind>(op.kind);
  return kind == OpKind::kLinear || kind == OpKind::kLinearInt8 || kind == OpKind::kLinearInt4 || kind == OpKind::kLinearBlocks;
}

bool reads_integers(const OpRecord& op) { return static_cast<OpKind>(op.kind) != OpKind::kLinear; }

Error check_part(const EngineFile& file, const AdapterPartRecord& part) {
  const std::string name = "a matrix of the adapter, for operation " + std::to_string(part.op) + ", ";
  if (part.op >= file.ops().size() || !is_linear(file.ops()[part.op])) return invalid(name + "which is no linear layer");
  const OpRecord& op = file.ops()[part.op];
  if (op.rows != static_cast<uint32_t>(RowsOf::kTokens) || op.out.buffer == kLogitsBuffer) {
    return invalid(name + "whose rows are not those of tokens");
  }
  if (part.depth != op.in[0].width || part.columns == 0 || uint64_t{part.first_column} + part.columns > op.out.width) {
    return invalid(name + "does not have its shape");
  }
  if (part.rank == 0 || part.rank > kMaxAdapterRank) return invalid(name + "has a rank of " + std::to_string(part.rank));
  if (part.dtype > static_cast<uint32_t>(DType::kBF16) || !part.down || !part.up) return invalid(name + "is not of floats");
  return {};
}

auto place(const AdapterPart& part) { return std::tuple(part.record.op, part.record.first_column); }

}  // namespace

Error Adapters::load(const EngineFile& file, uint32_t slot, std::span<const AdapterPartRecord> parts) {
  if (slot == 0 || slot > kMaxAdapterSlots || find(slot)) {
    return invalid("slot " + std::to_string(slot) + " for adapters is not free");
  }
  auto adapter = std::make_unique<Adapter>();
  for (const AdapterPartRecord& part : parts) {
    if (Error error = check_part(file, part)) return error;
    adapter->parts.push_back({part, 0});
  }
  std::ranges::sort(adapter->parts, {}, place);
  uint32_t inner = 0;
  for (size_t i = 0; i < adapter->parts.size(); ++i) {
    AdapterPart& part = adapter->parts[i];
    const bool is_first = i == 0 || adapter->parts[i - 1].record.op != part.record.op;
    if (!is_first && adapter->parts[i - 1].record.first_column + adapter->parts[i - 1].record.columns > part.record.first_column) {
      return invalid("two matrices of the adapter change the same columns of operation " + std::to_string(part.record.op));
    }
    part.inner = is_first ? 0 : inner;
    inner = part.inner + part.record.rank;
  }
  for (size_t op = 0, i = 0; op <= file.ops().size(); ++op) {
    while (i < adapter->parts.size() && adapter->parts[i].record.op < op) ++i;
    adapter->begins.push_back(static_cast<uint32_t>(i));
  }
  if (Error error = grow(file, *adapter)) return error;
  if (slots_.size() < slot) slots_.resize(slot);
  slots_[slot - 1] = std::move(adapter);
  return {};
}

// Room for what a step with this adapter computes on the way.
Error Adapters::grow(const EngineFile& file, const Adapter& adapter) {
  size_t inner = inner_width_, inputs = inputs_width_;
  for (const AdapterPart& part : adapter.parts) {
    inner = std::max<size_t>(inner, part.inner + part.record.rank);
    if (reads_integers(file.ops()[part.record.op])) inputs = std::max<size_t>(inputs, part.record.depth);
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
