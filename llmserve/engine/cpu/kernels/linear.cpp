// y = x @ weight.T for float weights of three formats, converted to f32 in registers.
//
// Order of one output: one chain of multiply-adds over the depth, from the first input to the last.
#include "tiles.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

template <class W>
struct FloatFormat {
  using Weights = F32x16;
  using Input = F32x16;
  using Sums = F32x16;
  static constexpr size_t kStepBytes = kPanelColumns * sizeof(W);

  static Sums zero() { return broadcast_f32(0.0f); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_half<kHalf>(reinterpret_cast<const W*>(p));
  }
  static Input broadcast(const std::byte* p) { return broadcast_f32(*reinterpret_cast<const float*>(p)); }
  static void add(Sums& sums, Input x, Weights w) { sums = fma(x, w, sums); }

 private:
  static F32x16 broadcast_f32(float value) { return LLMSERVE_VARIANT::broadcast(value); }
};

template <class W>
class FloatProduct {
 public:
  using Format = FloatFormat<W>;
  static constexpr size_t kStreamVectors = kVectorsPerPanel;
  using BlockFormat = FloatFormat<float>;  // converts narrower weights once for all rows of a block
  static constexpr size_t kExpandedStepBytes = std::is_same_v<W, float> ? 0 : BlockFormat::kStepBytes;

  explicit FloatProduct(const LinearArgs& args) : args_(args) {}

  const std::byte* weights() const { return static_cast<const std::byte*>(args_.weight); }
  size_t panel_bytes() const { return args_.depth * Format::kStepBytes; }
  size_t num_steps() const { return args_.depth; }
  size_t num_rows() const { return args_.num_rows; }
  const std::byte* rows(size_t first) const { return reinterpret_cast<const std::byte*>(args_.x.row(first)); }
  size_t row_bytes() const { return args_.x.stride * sizeof(float); }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] void accumulate(const TileInput& in, size_t, size_t, F32x16 (&sums)[R * V]) const {
    for (F32x16& sum : sums) sum = Format::zero();
    multiply<Format, R, V, kFirst, kFetch>(in, sums);
  }

  // Returns steps of a panel in `BlockFormat`: in place, or in `expanded`.
  static const std::byte* block(const std::byte* panel, size_t num_steps, std::byte* expanded) {
    if constexpr (kExpandedStepBytes == 0) return panel;
    auto* out = reinterpret_cast<float*>(expanded);
    for (size_t step = 0; step < num_steps; ++step, panel += Format::kStepBytes, out += kPanelColumns) {
      LLMSERVE_VARIANT::store(out, Format::template load<0>(panel));
      LLMSERVE_VARIANT::store(out + kLanes, Format::template load<1>(panel));
    }
    return expanded;
  }

  template <size_t R, size_t V>
  void fetch_outputs(size_t row, size_t column) const { fetch_tile<R, V>(args_, row, column); }

  template <size_t R, size_t V>
  void store(size_t row, size_t column, const F32x16 (&sums)[R * V]) const {
    store_tile<R, V>(args_, row, column, [&](size_t v, size_t, size_t) {
      return [&, v](size_t r) { return sums[r * V + v]; };
    });
  }

 private:
  const LinearArgs& args_;
};

}  // namespace

void linear(const LinearArgs& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  switch (args.weight_type) {
    case DType::kF32:
      return run_tactic<kFloatTactics>(FloatProduct<float>(args), tactic, panel_begin, panel_end);
    case DType::kF16:
      return run_tactic<kFloatTactics>(FloatProduct<Half>(args), tactic, panel_begin, panel_end);
    case DType::kBF16:
      return run_tactic<kFloatTactics>(FloatProduct<BFloat16>(args), tactic, panel_begin, panel_end);
    case DType::kI8:  // see linear_int8
    case DType::kI4:  // see linear_int4
    case DType::kI5:  // see linear_blocks
    case DType::kI6:
    case DType::kI2:
    case DType::kI3:
      break;
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
