// Mixtures of experts in a step: rows are sorted by expert, and their results are summed for each token.
#include <algorithm>
#include <utility>

#include "executor.h"

namespace llmserve {

void Executor::route(const OpRecord& op, size_t begin, size_t end) {
  const RouteArgs args = {
      .logits = view<const float>(op.in[0], begin),
      .num_experts = op.in[0].width,
      .chosen = header_.experts_per_token,
      .is_sigmoid = (op.groups & kRouteSigmoid) != 0,
      .to_one = (op.groups & kRouteToOne) != 0,
      .bias = engine_.file_.tensor<float>(op.tensors[0]),
      .factor = op.scalar == 0.0f ? 1.0f : op.scalar,
      .tolerance = op.soft_cap,
      .num_groups = op.num_heads,
      .chosen_groups = op.head_dim,
      .by_best = (op.groups & kRouteByBest) != 0,
      .scales = engine_.file_.tensor<float>(op.tensors[1]),
  };
  engine_.kernels_->route(args, end - begin, view<float>(op.out, begin));
}

// A counting sort by expert; the rows of each expert are in the order of their tokens.
void Executor::dispatch(const OpRecord& op) {
  Dispatch& d = engine_.dispatch_;
  const size_t chosen = header_.experts_per_token, num_experts = op.groups;
  const auto routes = view<const float>(op.in[0]);
  const auto expert = [&](size_t token, size_t i) {  // in range, whatever the buffer contains
    const float number = routes.row(token)[i];
    return number >= 0.0f && number < static_cast<float>(num_experts) ? static_cast<size_t>(number) : size_t{0};
  };
  std::fill(d.ends.begin(), d.ends.end(), 0);
  for (size_t token = 0; token < step_.num_tokens; ++token) {
    for (size_t i = 0; i < chosen; ++i) ++d.ends[expert(token, i)];
  }
  d.active.clear();
  uint32_t begin = 0;
  for (size_t e = 0; e < num_experts; ++e) {  // from counts of rows to their first row
    if (d.ends[e] > 0) d.active.push_back({static_cast<uint32_t>(e), begin, d.ends[e]});
    begin += std::exchange(d.ends[e], begin);
  }
  for (size_t token = 0; token < step_.num_tokens; ++token) {
    for (size_t i = 0; i < chosen; ++i) {
      const uint32_t row = d.ends[expert(token, i)]++;
      d.tokens[row] = static_cast<uint32_t>(token);
      d.rows[token * chosen + i] = row;
    }
  }
}

// The weight of a row of kChosen, from the routes of its token.
float Executor::weight_of(const Operand& routes, size_t row) const {
  const Dispatch& d = engine_.dispatch_;
  const size_t chosen = header_.experts_per_token, token = d.tokens[row];
  size_t i = 0;
  while (i + 1 < chosen && d.rows[token * chosen + i] != row) ++i;
  return view<const float>(routes, token).data[chosen + i];
}

void Executor::combine(const OpRecord& op, size_t begin, size_t end) {
  const size_t chosen = header_.experts_per_token;
  for (size_t token = begin; token < end; ++token) {
    const float* weights = op.groups ? nullptr : view<const float>(op.in[1], token).data + chosen;
    engine_.kernels_->combine(view<const float>(op.in[0]), engine_.dispatch_.rows.data() + token * chosen, weights, chosen,
                              op.out.width, view<float>(op.out, token).data);
  }
}

void Executor::sigmoid_gate(const OpRecord& op, size_t begin, size_t end) {
  const auto x = view<const float>(op.in[0], first_row(op) + begin);
  const auto gate = view<const float>(op.in[1], first_row(op) + begin);
  const bool is_wide = op.in[1].width > 1;
  engine_.kernels_->sigmoid_gate(x, gate, is_wide, op.groups != 0, op.out.width, end - begin, view<float>(op.out, begin));
}

}  // namespace llmserve
