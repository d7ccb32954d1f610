#include "executor.h"

#include <algorithm>

namespace llmserve {

std::byte* Executor::cache_plane(uint32_t layer, uint32_t values) const {
  return engine_.cache_.data() + (size_t{2} * engine_.places_[layer].part + values) * engine_.cache_plane_bytes_;
}

void Executor::run() {
  const auto ops = engine_.file_.ops();
  TaskCounter* counter = engine_.counters_.get();
  for (size_t i = 0; i < engine_.head_; ++i, ++counter) {
    if (num_rows(ops[i]) > 0 || hands_out(ops[i])) execute(ops[i], *counter);
  }
  for (piece_begin_ = 0; piece_begin_ < step_.num_selected; piece_begin_ += piece_rows_) {
    piece_rows_ = std::min(step_.num_selected - piece_begin_, engine_.logits_rows_);
    for (const OpRecord& op : ops.subspan(engine_.head_)) execute(op, *counter++);
    use_logits(*counter++);
  }
}

void Executor::execute(const OpRecord& op, TaskCounter& tasks) {
  const size_t count = hands_out(op) ? step_.num_tokens : num_rows(op);
  const size_t grain = std::max<size_t>(1, count / (engine_.threads_->size() * 4));
  const auto over_rows = [&](auto member, auto... own) {
    tasks.for_pieces(count, grain, [&](size_t begin, size_t end) { (this->*member)(op, begin, end, own...); });
  };
  const KernelTable& kernels = *engine_.kernels_;
  switch (static_cast<OpKind>(op.kind)) {  // no default, so that the compiler reports a missing op
    case OpKind::kEmbed:
      return over_rows(&Executor::embed, step_.token_ids);
    case OpKind::kEmbedPosition:
      return over_rows(&Executor::embed, engine_.positions_.data());
    case OpKind::kEmbedSegment:
      return over_rows(&Executor::embed, engine_.segments_.data());
    case OpKind::kPool:
      return over_rows(&Executor::pool);
    case OpKind::kRmsNorm:
      return over_rows(&Executor::rms_norm);
    case OpKind::kLayerNorm:
      return over_rows(&Executor::layer_norm);
    case OpKind::kGelu:
      return over_rows(&Executor::activate, kernels.gelu);
    case OpKind::kGeluTanh:
      return over_rows(&Executor::activate, kernels.gelu_tanh);
    case OpKind::kReluSquared:
      return over_rows(&Executor::activate, kernels.relu_squared);
    case OpKind::kScaleByPosition:
      return over_rows(&Executor::scale_by_position);
    case OpKind::kLinear:
      return linear(op, tasks);
    case OpKind::kLinearInt8:
      return linear_grouped(op, tasks, kernels.linear_int8);
    case OpKind::kLinearInt4:
      return linear_grouped(op, tasks, kernels.linear_int4);
    case OpKind::kLinearBlocks:
      return linear_grouped(op, tasks, kernels.linear_blocks);
    case OpKind::kAttention:
      return attention(op, tasks);
    case OpKind::kQuantize:
      return tasks.for_pieces(count, grain, [&](size_t begin, size_t end) { quantize(op, begin, end, scratch()); });
    case OpKind::kRopeTable:
      return over_rows(&Executor::rope_table);
    case OpKind::kCacheWrite:
      return over_rows(&Executor::cache_write);
    case OpKind::kSelectRows:
      return over_rows(hands_out(op) ? &Executor::hand_out : &Executor::select_rows);
    case OpKind::kGatedSilu:
      return over_rows(&Executor::activate, kernels.gated_silu);
    case OpKind::kGatedGeluTanh:
      return over_rows(&Executor::activate, kernels.gated_gelu_tanh);
    case OpKind::kGatedGelu:
      return over_rows(&Executor::activate, kernels.gated_gelu);
    case OpKind::kGatedClamped:
      return over_rows(&Executor::activate, kernels.gated_clamped);
    case OpKind::kRope:
      return over_rows(&Executor::rope);
    case OpKind::kAdd:
      return over_rows(&Executor::pairwise, kernels.add);
    case OpKind::kMultiply:
      return op.in[1].buffer == kNoBuffer ? over_rows(&Executor::multiply_columns)
                                          : over_rows(&Executor::pairwise, kernels.multiply);
    case OpKind::kMix:
      return over_rows(&Executor::mix);
    case OpKind::kSpread:
      return over_rows(&Executor::spread);
    case OpKind::kWithHidden:
      return over_rows(&Executor::with_hidden);
    case OpKind::kOverThreshold:
      return over_rows(&Executor::over_threshold);
    case OpKind::kRoute:
      return over_rows(&Executor::route);
    case OpKind::kDispatch:
      return tasks.for_pieces(1, 1, [&](size_t, size_t) { dispatch(op); });
    case OpKind::kCombine:
      return over_rows(&Executor::combine);
    case OpKind::kSigmoidGate:
      return over_rows(&Executor::sigmoid_gate);
    case OpKind::kConvolution:
      return convolution(op, tasks);
    case OpKind::kDeltaRule:
      return delta_rule(op, tasks);
    case OpKind::kSelectiveScan:
      return selective_scan(op, tasks);
    case OpKind::kScale:
      return in_place(op, tasks, kernels.scale);
    case OpKind::kSoftCap:
      return in_place(op, tasks, kernels.soft_cap);
  }
}

void Executor::rms_norm(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0], first_row(op) + begin);
  const float* weight = engine_.file_.tensor<float>(op.tensors[0]);
  const auto y = view<float>(op.out, begin);
  engine_.kernels_->rms_norm(x, weight, op.window != 0, op.scalar, op.groups, op.out.width, end - begin, y);
}

LayerNormArgs Executor::layer_norm_args(const OpRecord& op, size_t groups) const {
  return {engine_.file_.tensor<float>(op.tensors[0]), engine_.file_.tensor<float>(op.tensors[1]), op.scalar, groups,
          op.out.width};
}

void Executor::layer_norm(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0], first_row(op) + begin);
  engine_.kernels_->layer_norm(x, layer_norm_args(op, op.groups), end - begin, view<float>(op.out, begin));
}

void Executor::activate(const OpRecord& op, size_t begin, size_t end, decltype(KernelTable::gelu) kernel) {
  kernel(view<const float>(op.in[0], first_row(op) + begin), op.out.width, end - begin, view<float>(op.out, begin));
}

void Executor::pairwise(const OpRecord& op, size_t begin, size_t end, decltype(KernelTable::add) kernel) {
  const auto a = view<const float>(op.in[0], first_row(op) + begin);
  const auto b = view<const float>(op.in[1], first_row(op) + begin);
  kernel(a, b, op.out.width, end - begin, view<float>(op.out, begin));
}

// Processes one row at a time, so that the row stays in the nearest cache until it is quantized.
void Executor::quantize(const OpRecord& op, size_t begin, size_t end, float* scratch) {
  for (size_t row = begin; row < end; ++row) {
    const View<const float> x = before_quantization(op, view<const float>(op.in[0], row), scratch);
    engine_.kernels_->quantize(x, op.out.width, 1, quantized_rows(op.out, op.in[1], row));
  }
}

// Returns the row x itself or, in `scratch`, the result of the function that precedes quantization.
View<const float> Executor::before_quantization(const OpRecord& op, View<const float> x, float* scratch) const {
  const KernelTable& kernels = *engine_.kernels_;
  const size_t width = op.out.width;
  const View<float> made = {scratch, width};
  switch (static_cast<Before>(op.before)) {
    case Before::kNothing:
      return x;
    case Before::kRmsNorm:
      kernels.rms_norm(x, engine_.file_.tensor<float>(op.tensors[0]), false, op.scalar, 1, width, 1, made);
      break;
    case Before::kLayerNorm:
      kernels.layer_norm(x, layer_norm_args(op, 1), 1, made);
      break;
    case Before::kGelu:
      kernels.gelu(x, width, 1, made);
      break;
    case Before::kGeluTanh:
      kernels.gelu_tanh(x, width, 1, made);
      break;
    case Before::kReluSquared:
      kernels.relu_squared(x, width, 1, made);
      break;
    case Before::kGatedSilu:
      kernels.gated_silu(x, width, 1, made);
      break;
    case Before::kGatedGeluTanh:
      kernels.gated_gelu_tanh(x, width, 1, made);
      break;
    case Before::kGatedGelu:
      kernels.gated_gelu(x, width, 1, made);
      break;
    case Before::kGatedClamped:
      kernels.gated_clamped(x, width, 1, made);
      break;
  }
  return {scratch, width};
}

// Rows of logits are long and few, so they are cut into pieces, too.
void Executor::in_place(const OpRecord& op, TaskCounter& tasks, decltype(KernelTable::scale) kernel) {
  constexpr size_t kColumns = 8192;
  const size_t pieces = (op.out.width + kColumns - 1) / kColumns;
  const float* of_file = engine_.file_.tensor<float>(op.tensors[0]);
  const float scalar = of_file ? *of_file : op.scalar;
  tasks.for_pieces(num_rows(op) * pieces, 1, [&](size_t index, size_t) {
    const size_t begin = index % pieces * kColumns;
    const auto row = view<float>(op.out, index / pieces);
    kernel({row.data + begin, row.stride}, scalar, std::min<size_t>(kColumns, op.out.width - begin), 1);
  });
}

float* Executor::scratch() const {
  return reinterpret_cast<float*>(engine_.scratch_.data()) + thread_ * engine_.scratch_floats_;
}

size_t Executor::tactic(const OpRecord& op, size_t num_rows) const {
  const auto index = static_cast<size_t>(&op - engine_.file_.ops().data());
  return engine_.tactics_[index * kRowBuckets + row_bucket(num_rows)];
}

// A linear layer has enough pieces to share evenly, but long ones, since the beginning of a piece is not prefetched.
constexpr size_t kPanelsPerPiece = 6, kPiecesPerThread = 4;

// Calls fn(begin, end) for the panels of a linear layer, and adds what adapters contribute to them.
template <class Fn>
void Executor::over_panels(const OpRecord& op, TaskCounter& tasks, Fn fn) {
  const auto index = static_cast<size_t>(&op - engine_.file_.ops().data());
  const size_t num_pieces = num_adapted(index);
  begin_adapters(op, index, num_pieces);
  const size_t threads = engine_.threads_->size();
  const size_t panels = (op.out.width + kPanelColumns - 1) / kPanelColumns;
  const size_t pieces = std::clamp(panels / kPanelsPerPiece, threads, threads * kPiecesPerThread);
  tasks.for_pieces(panels, (panels + pieces - 1) / pieces, [&](size_t begin, size_t end) {
    fn(begin, end);
    add_adapters(op, index, num_pieces, begin, end);
  });
}

// Calls fn(rows of an expert, begin, end) for the panels of all experts that have rows, in one loop. The number of
// pieces depends only on the number of rows, because a late thread may already see the rows of a later layer.
template <class Fn>
void Executor::over_experts(const OpRecord& op, TaskCounter& tasks, Fn fn) {
  const size_t threads = engine_.threads_->size(), panels = op.out.width / kPanelColumns;
  const size_t experts = std::min(engine_.dispatch_.ends.size(), num_rows(op));
  const size_t least = (threads + experts - 1) / experts, most = (threads * kPiecesPerThread + experts - 1) / experts;
  const size_t pieces = std::min(panels, std::clamp(panels / kPanelsPerPiece, least, most));
  tasks.for_pieces(experts * pieces, 1, [&](size_t index, size_t) {
    const size_t place = index / pieces, piece = index % pieces;
    if (place >= engine_.dispatch_.active.size()) return;
    fn(engine_.dispatch_.active[place], piece * panels / pieces, (piece + 1) * panels / pieces);
  });
}

void Executor::linear(const OpRecord& op, TaskCounter& tasks) {
  const LinearArgs args = {
      .x = view<const float>(op.in[0], first_row(op)),
      .num_rows = num_rows(op),
      .depth = op.in[0].width,
      .columns = op.out.width,
      .weight = engine_.file_.tensor<void>(op.tensors[0]),
      .weight_type = static_cast<DType>(engine_.file_.record(op.tensors[0]).dtype),
      .bias = engine_.file_.tensor<float>(op.tensors[1]),
      .residual = view<const float>(op.in[1], first_row(op)),
      .y = view<float>(op.out),
  };
  if (rows_of(op) == RowsOf::kChosen) {
    return over_experts(op, tasks, [&](const ExpertRows& rows, size_t begin, size_t end) {
      LinearArgs of_expert = args;
      of_expert.x = view<const float>(op.in[0], rows.begin);
      of_expert.num_rows = rows.count;
      of_expert.weight = of_stack<std::byte>(op.tensors[0], rows.expert);
      if (args.bias) of_expert.bias = args.bias + rows.expert * args.columns;
      of_expert.y = view<float>(op.out, rows.begin);
      engine_.kernels_->linear(of_expert, tactic(op, rows.count), begin, end);
    });
  }
  const size_t chosen = tactic(op, args.num_rows);
  over_panels(op, tasks, [&](size_t begin, size_t end) { engine_.kernels_->linear(args, chosen, begin, end); });
}

// One expert's part of a tensor that stacks all experts.
template <class T>
const T* Executor::of_stack(int32_t tensor, size_t expert) const {
  const size_t bytes = tensor_bytes(engine_.file_.record(tensor)) / engine_.dispatch_.ends.size();
  return reinterpret_cast<const T*>(engine_.file_.tensor<std::byte>(tensor) + expert * bytes);
}

// Values, and the facts of a row: the scales of its groups, followed by the offsets for zero points and minima.
QuantizedRows Executor::quantized_rows(const Operand& values, const Operand& facts, size_t first_row) const {
  const auto scales = view<float>(facts, first_row);
  const size_t groups = num_quantized_groups(values.width);
  int32_t* offsets = view<int32_t>(facts, first_row).data + groups;
  View<int32_t> halves = {};
  if (facts.width == 3 * groups) halves = {offsets + groups, scales.stride};
  return {view<int8_t>(values, first_row), scales, {offsets, scales.stride}, halves};
}

void Executor::linear_grouped(const OpRecord& op, TaskCounter& tasks, decltype(KernelTable::linear_int8) kernel) {
  const LinearGroupedArgs args = {
      .x = quantized_rows(op.in[0], op.in[2], first_row(op)),
      .num_rows = num_rows(op),
      .depth = op.in[0].width,
      .columns = op.out.width,
      .weight = engine_.file_.tensor<uint8_t>(op.tensors[0]),
      .groups = engine_.file_.tensor<void>(op.tensors[2]),
      .column_scale = engine_.file_.tensor<float>(op.tensors[3]),
      .bias = engine_.file_.tensor<float>(op.tensors[1]),
      .residual = view<const float>(op.in[1], first_row(op)),
      .y = view<float>(op.out),
      .code_bits = code_bits(static_cast<DType>(engine_.file_.record(op.tensors[0]).dtype)),
      .blocks = static_cast<Blocks>(op.groups),
  };
  if (rows_of(op) == RowsOf::kChosen) {
    return over_experts(op, tasks, [&](const ExpertRows& rows, size_t begin, size_t end) {
      LinearGroupedArgs of_expert = args;
      of_expert.x = quantized_rows(op.in[0], op.in[2], rows.begin);
      of_expert.num_rows = rows.count;
      of_expert.weight = of_stack<uint8_t>(op.tensors[0], rows.expert);
      of_expert.groups = of_stack<std::byte>(op.tensors[2], rows.expert);
      of_expert.column_scale = of_stack<float>(op.tensors[3], rows.expert);
      if (args.bias) of_expert.bias = args.bias + rows.expert * args.columns;
      of_expert.y = view<float>(op.out, rows.begin);
      kernel(of_expert, tactic(op, rows.count), begin, end);
    });
  }
  const size_t chosen = tactic(op, args.num_rows);
  over_panels(op, tasks, [&](size_t begin, size_t end) { kernel(args, chosen, begin, end); });
}

void Executor::cache_write(const OpRecord& op, size_t begin, size_t end) {
  engine_.kernels_->cache_write({
      .shape = engine_.layer_shapes_[op.layer],
      .keys = view<const float>(op.in[0], begin),
      .values = view<const float>(op.in[1], begin),
      .rope = view<const float>(op.in[2], begin),
      .rotary_dim = op.in[2].width,
      .slots = engine_.slots_.data() + size_t{engine_.places_[op.layer].table} * header_.max_num_tokens + begin,
      .num_rows = end - begin,
      .key_plane = cache_plane(op.layer, 0),
      .value_plane = cache_plane(op.layer, 1),
  });
}

void Executor::attention(const OpRecord& op, TaskCounter& tasks) {
  const KernelTable& kernels = *engine_.kernels_;
  const auto kernel = engine_.cache_shape_.has_integers() ? kernels.attention_int8 : kernels.attention;
  const CacheShape& shape = engine_.layer_shapes_[op.layer];
  const uint32_t table = engine_.places_[op.layer].table;
  tasks.for_pieces(engine_.attention_tasks_.size(), 1, [&](size_t index, size_t) {
    const AttentionTask& task = engine_.attention_tasks_[index];
    if (task.kv_head >= shape.num_kv_heads) return;
    const ChunkRecord& chunk = step_.chunks[task.chunk];
    const size_t queries = op.num_heads / shape.num_kv_heads, parts = engine_.attention_parts_;
    const size_t begin = queries * task.part / parts, of_part = queries * (task.part + 1) / parts - begin;
    if (of_part == 0) return;
    // The kernel is called as if only this part's heads existed: it looks for them at kv_head * of_part.
    const size_t first = task.kv_head * (queries - of_part) + begin;
    const auto of_heads = [&](int32_t t) {
      const float* numbers = engine_.file_.tensor<float>(t);
      return numbers ? numbers + first : nullptr;
    };
    const auto heads_of = [&](auto rows) { return View{rows.data + first * shape.head_dim, rows.stride}; };
    const AttentionArgs args = {
        .shape = shape,
        .q = heads_of(view<const float>(op.in[0], chunk.first_token)),
        .rope = view<const float>(op.in[1], chunk.first_token),
        .rotary_dim = op.in[1].width,
        .y = heads_of(view<float>(op.out, chunk.first_token)),
        .key_plane = cache_plane(op.layer, 0),
        .value_plane = cache_plane(op.layer, 1),
        .block_ids = step_.block_ids + chunk.first_block + size_t{table} * chunk.num_blocks,
        .num_heads = of_part * shape.num_kv_heads,
        .start = chunk.start,
        .window = op.window,
        .scale = op.scalar,
        .soft_cap = op.soft_cap,
        .slopes = of_heads(op.tensors[0]),
        .sinks = of_heads(op.tensors[1]),
        .in_chunks = op.groups == kInStretches,
        .end = op.groups == kBidirectional ? size_t{chunk.start} + chunk.num_tokens : 0,
    };
    kernel(args, task.kv_head, task.row_begin, task.row_end, scratch());
  });
}

void Executor::use_logits(TaskCounter& tasks) {
  wait_for_masks(step_);
  const LogitsPiece piece = {reinterpret_cast<const float*>(engine_.logits_.data()), piece_begin_, piece_rows_,
                             engine_.output_width_};
  const Wanted wanted = wanted_of(step_, piece);
  tasks.for_pieces(wanted.size(), 1, [&](size_t i, size_t) {
    engine_.choosers_[thread_].answer(step_, piece, wanted, i);
  });
}

}  // namespace llmserve
