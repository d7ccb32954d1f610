#include "choosing.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

namespace llmserve {
namespace {

constexpr std::chrono::microseconds kMaskPoll{20};

// The records that request logits of the piece. Records are sorted by selected row.
template <class Record, class Fn>
std::span<const Record> of_piece(std::span<const Record> records, const LogitsPiece& piece, Fn selected) {
  const auto begin = std::ranges::lower_bound(records, piece.begin, {}, selected);
  const auto end = std::ranges::lower_bound(records, piece.begin + piece.num_rows, {}, selected);
  return {begin, end};
}

}  // namespace

Wanted wanted_of(const StepRecord& step, const LogitsPiece& piece) {
  return {
      of_piece(std::span(step.samples, step.num_samples), piece, &SampleRecord::selected),
      of_piece(std::span(step.scores, step.num_scores), piece, &ScoreRecord::selected),
      of_piece(std::span(step.kept_rows, step.num_kept), piece, std::identity()),
  };
}

void wait_for_masks(const StepRecord& step) {
  if (!step.masks_ready) return;
  while (__atomic_load_n(step.masks_ready, __ATOMIC_ACQUIRE) == 0) std::this_thread::sleep_for(kMaskPoll);
}

void Chooser::answer(const StepRecord& step, const LogitsPiece& piece, const Wanted& wanted, size_t index) {
  if (index < wanted.samples.size()) {
    const SampleRecord& request = wanted.samples[index];
    return sample(step, piece.row(request.selected), request);
  }
  index -= wanted.samples.size();
  if (index < wanted.scores.size()) {
    const ScoreRecord& request = wanted.scores[index];
    step.score_log_probs[&request - step.scores] =
        scorer_.score(piece.row(request.selected), request.token, {step.top_ids + request.first_top, request.num_top},
                      step.top_log_probs + request.first_top);
    return;
  }
  const uint32_t& row = wanted.kept[index - wanted.scores.size()];
  std::copy_n(piece.row(row), piece.vocab_size, step.logits + static_cast<size_t>(&row - step.kept_rows) * piece.vocab_size);
}

void Chooser::sample(const StepRecord& step, const float* row, const SampleRecord& request) {
  const auto index = &request - step.samples;
  step.tokens[index] = sampler_.sample(row, step, request);
  if (!request.want_log_prob && request.num_top == 0) return;
  step.log_probs[index] = scorer_.score(row, step.tokens[index], {step.top_ids + request.first_top, request.num_top},
                                        step.top_log_probs + request.first_top);
}

ChooserPool::ChooserPool(const KernelTable& kernels, size_t vocab_size, unsigned num_threads)
    : vocab_size_(vocab_size), threads_(num_threads) {
  for (unsigned i = 0; i < threads_.size(); ++i) choosers_.emplace_back(kernels, vocab_size);
}

Error ChooserPool::choose(const StepRecord& step, const float* logits, size_t begin, size_t num_rows) {
  if (Error error = check_requests(step, static_cast<uint32_t>(vocab_size_))) return error;
  if (begin + num_rows > step.num_selected) return invalid("a piece of logits has more rows than the step selects");
  wait_for_masks(step);
  const LogitsPiece piece = {logits, begin, num_rows, vocab_size_};
  const Wanted wanted = wanted_of(step, piece);
  tasks_.reset(threads_.spins());
  threads_.run([&](unsigned thread) {
    tasks_.for_pieces(wanted.size(), 1, [&](size_t i, size_t) { choosers_[thread].answer(step, piece, wanted, i); });
  });
  return {};
}

}  // namespace llmserve
