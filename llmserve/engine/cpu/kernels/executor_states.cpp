// Ops with a state: the rows of a sequence are processed in order, all sequences in one parallel loop.
#include <algorithm>

#include "executor.h"

namespace llmserve {

// Calls fn(first, count, state before, state after) for the rows of a chunk, in two runs if a state is kept in between.
template <class Fn>
void Executor::over_runs(const OpRecord& op, const ChunkRecord& chunk, Fn fn) const {
  auto* states = reinterpret_cast<float*>(engine_.states_.data());
  const size_t offset = engine_.state_offsets_[static_cast<size_t>(&op - engine_.file_.ops().data())];
  const auto slot = [&](uint32_t index) { return states + index * engine_.state_floats_ + offset; };
  const float* before = chunk.start == 0 ? nullptr : slot(chunk.state_before);
  if (chunk.num_kept > 0) {
    float* kept = slot(chunk.state_kept);
    fn(0, chunk.num_kept, before, kept);
    before = kept;
  }
  fn(chunk.num_kept, chunk.num_tokens - chunk.num_kept, before, slot(chunk.state_after));
}

void Executor::convolution(const OpRecord& op, TaskCounter& tasks) {
  const size_t width = op.out.width, pieces = (width + kStateColumns - 1) / kStateColumns;
  tasks.for_pieces(step_.num_chunks * pieces, 1, [&](size_t index, size_t) {
    const ChunkRecord& chunk = step_.chunks[index / pieces];
    const size_t begin = index % pieces * kStateColumns;
    over_runs(op, chunk, [&](uint32_t first, uint32_t count, const float* before, float* after) {
      const ConvolutionArgs args = {
          .x = view<const float>(op.in[0], chunk.first_token + first),
          .num_rows = count,
          .width = width,
          .weight = engine_.file_.tensor<float>(op.tensors[0]),
          .bias = engine_.file_.tensor<float>(op.tensors[1]),
          .taps = op.window,
          .silu = op.groups != 0,
          .before = before,
          .after = after,
          .y = view<float>(op.out, chunk.first_token + first),
      };
      engine_.kernels_->convolution(args, begin, std::min(begin + kStateColumns, width));
    });
  });
}

// Calls fn(args(...) of a run, head, begin, end) for each panel of each head.
template <class Args, class Fn>
void Executor::over_head_panels(const OpRecord& op, TaskCounter& tasks, Args args, Fn fn) const {
  const size_t width = op.out.width / op.num_heads, pieces = (width + kStateColumns - 1) / kStateColumns;
  const size_t of_chunk = op.num_heads * pieces;
  tasks.for_pieces(step_.num_chunks * of_chunk, 1, [&](size_t index, size_t) {
    const ChunkRecord& chunk = step_.chunks[index / of_chunk];
    const size_t head = index % of_chunk / pieces, begin = index % pieces * kStateColumns;
    over_runs(op, chunk, [&](uint32_t first, uint32_t count, const float* before, float* after) {
      fn(args(chunk.first_token + first, count, before, after), head, begin, std::min(begin + kStateColumns, width));
    });
  });
}

void Executor::delta_rule(const OpRecord& op, TaskCounter& tasks) {
  const auto args = [&](size_t first, size_t count, const float* before, float* after) {
    return DeltaRuleArgs{
        .qkv = view<const float>(op.in[0], first),
        .gates = view<const float>(op.in[1], first),
        .num_rows = count,
        .num_heads = op.num_heads,
        .num_key_heads = op.groups,
        .key_dim = op.head_dim,
        .value_dim = op.out.width / op.num_heads,
        .decay = engine_.file_.tensor<float>(op.tensors[0]),
        .bias = engine_.file_.tensor<float>(op.tensors[1]),
        .before = before,
        .after = after,
        .y = view<float>(op.out, first),
    };
  };
  over_head_panels(op, tasks, args, engine_.kernels_->delta_rule);
}

void Executor::selective_scan(const OpRecord& op, TaskCounter& tasks) {
  const auto args = [&](size_t first, size_t count, const float* before, float* after) {
    return SelectiveScanArgs{
        .xbc = view<const float>(op.in[0], first),
        .steps = view<const float>(op.in[1], first),
        .num_rows = count,
        .num_heads = op.num_heads,
        .num_groups = op.groups,
        .state_size = op.head_dim,
        .head_dim = op.out.width / op.num_heads,
        .decay = engine_.file_.tensor<float>(op.tensors[0]),
        .bias = engine_.file_.tensor<float>(op.tensors[1]),
        .skip = engine_.file_.tensor<float>(op.tensors[2]),
        .before = before,
        .after = after,
        .y = view<float>(op.out, first),
    };
  };
  over_head_panels(op, tasks, args, engine_.kernels_->selective_scan);
}

}  // namespace llmserve
