#include "tactics.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "engine_file.h"
#include "isa.h"
#include "memory.h"

namespace llmserve {
namespace {

constexpr size_t kColdBytes = size_t{64} << 20;  // more than most caches hold
constexpr size_t kSmallBytes = size_t{1} << 20;  // smaller weights stay in a cache from step to step
constexpr int kMostRuns = 8;
constexpr double kEnoughSeconds = 0.02;
constexpr uint32_t kAmxBucket = 6;  // the bucket of 33 to 64 rows

// Operands of a trial. Values do not matter if they are ordinary numbers: bytes of 0x11 are, in every format.
class Operands {
 public:
  explicit Operands(const LinearTrial& trial)
      : trial_(trial),
        weight_bytes_(tensor_bytes({static_cast<uint32_t>(trial.weight_type), static_cast<uint32_t>(trial.columns),
                                    static_cast<uint32_t>(trial.depth), static_cast<uint32_t>(Layout::kPanels), 0})),
        num_copies_(weight_bytes_ < kSmallBytes ? 1 : std::max<size_t>(1, kColdBytes / weight_bytes_)),
        weights_(Mapping::anonymous(weight_bytes_ * num_copies_)),
        row_values_(trial.num_rows * (trial.depth + 3), 1.0f),
        column_values_(padded_columns() * num_quantized_groups(trial.depth), 1.0f),
        offsets_(trial.num_rows * num_quantized_groups(trial.depth)),
        y_(trial.num_rows * trial.columns) {
    if (!weights_.data()) throw std::bad_alloc();
    std::memset(weights_.data(), 0x11, weights_.size());
  }

  size_t num_panels() const { return padded_columns() / kPanelColumns; }

  void run(const KernelTable& kernels, size_t tactic, size_t turn) {
    const LinearTrial& t = trial_;
    const std::byte* weight = weights_.data() + turn % num_copies_ * weight_bytes_;
    const View<float> y = {y_.data(), t.columns};
    if (t.weight_type >= DType::kI8) {
      const size_t groups = num_quantized_groups(t.depth);
      const LinearGroupedArgs args = {
          {{reinterpret_cast<int8_t*>(row_values_.data()), (t.depth + 3) / 4 * 4}, {row_values_.data(), groups},
           {offsets_.data(), groups}, {offsets_.data(), groups}},
          t.num_rows, t.depth, t.columns, reinterpret_cast<const uint8_t*>(weight), column_values_.data(),
          column_values_.data(), nullptr, {}, y, code_bits(t.weight_type),
          in_half_groups(t.weight_type) ? Blocks::kHalfScales : Blocks::kScaleAndMinimum};
      const auto kernel = t.weight_type == DType::kI8   ? kernels.linear_int8
                          : t.weight_type == DType::kI4 ? kernels.linear_int4
                                                        : kernels.linear_blocks;
      kernel(args, tactic, 0, num_panels());
    } else {
      const LinearArgs args = {{row_values_.data(), t.depth}, t.num_rows, t.depth, t.columns, weight, t.weight_type,
                               nullptr, {}, y};
      kernels.linear(args, tactic, 0, num_panels());
    }
  }

 private:
  size_t padded_columns() const { return (trial_.columns + kPanelColumns - 1) / kPanelColumns * kPanelColumns; }

  const LinearTrial trial_;
  const size_t weight_bytes_;
  const size_t num_copies_;
  const Mapping weights_;  // in large pages: of small ones, touching them would take longer than the trials
  std::vector<float> row_values_;
  std::vector<float> column_values_;
  std::vector<int32_t> offsets_;
  std::vector<float> y_;
};

// All tactics for a weight type. A tactic with AMX is the last of its list.
std::span<const LinearTactic> all_tactics(const KernelTable& kernels, DType weight_type) {
  switch (weight_type) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
      return kernels.float_tactics;
    case DType::kI8:
      return kernels.int8_tactics;
    case DType::kI4:
    case DType::kI5:
    case DType::kI6:
    case DType::kI2:
    case DType::kI3:
      return kernels.int4_tactics;
  }
  return {};
}

}  // namespace

uint32_t row_bucket(size_t num_rows) {
  return std::min<uint32_t>(static_cast<uint32_t>(std::bit_width(num_rows - 1)), kRowBuckets - 1);
}

std::span<const LinearTactic> tactics_for(const KernelTable& kernels, DType weight_type, uint32_t bucket) {
  const auto known = all_tactics(kernels, weight_type);
  if (known.empty() || !known.back().amx) return known;
  const bool runs = !in_half_groups(weight_type) && known.back().max_rows <= size_t{1} << bucket && has_amx();
  return runs ? known : known.first(known.size() - 1);
}

// For few rows, wide tiles, which need few broadcasts; for more, tiles that read and convert a weight for more rows.
// From 33 rows on, AMX took 0.5 to 1.0 of the others' time in 64 of 65 trials with int8, int4 and int5.
uint32_t default_tactic(std::span<const LinearTactic> tactics, uint32_t bucket) {
  if (!tactics.empty() && tactics.back().amx && bucket >= kAmxBucket) return static_cast<uint32_t>(tactics.size() - 1);
  if (tactics.size() < 2 || (size_t{1} << bucket) <= tactics[0].max_rows) return 0;
  return tactics[1].blocked || tactics[1].max_rows > tactics[0].max_rows ? 1 : 0;
}

void time_linear(const KernelTable& kernels, const LinearTrial& trial, std::span<double> seconds) {
  using Clock = std::chrono::steady_clock;
  Operands operands(trial);  // shared by all tactics: writing them takes longer than most runs
  size_t num_runs = 0;       // each run uses the weights that were read the longest time ago
  for (size_t tactic = 0; tactic < seconds.size(); ++tactic) {
    double best = 1e30, total = 0.0;
    for (int turn = 0; turn < kMostRuns && (turn < 3 || total < kEnoughSeconds); ++turn) {
      const auto begin = Clock::now();
      operands.run(kernels, tactic, num_runs++);
      const double needed = std::chrono::duration<double>(Clock::now() - begin).count();
      total += needed;
      if (turn > 0) best = std::min(best, needed);  // the first run touches everything for the first time
    }
    seconds[tactic] = best;
  }
}

}  // namespace llmserve
