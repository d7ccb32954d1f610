// y = x @ weight.T for int8 weights and activations: exact integer sums, then one scale per row and column.
#include "tiles.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

struct Int8Format {
  using Weights = QuadWeights;
  using Input = QuadInput;
  using Sums = QuadSums;
  static constexpr size_t kStepBytes = kPanelColumns * 4;

  static Sums zero() { return zero_quads(); }
  template <size_t kHalf>
  static Weights load(const std::byte* p) {
    return load_quads(reinterpret_cast<const int8_t*>(p) + 4 * kLanes * kHalf);
  }
  static Input broadcast(const std::byte* p) { return broadcast_quad(reinterpret_cast<const uint8_t*>(p)); }
  static void add(Sums& sums, Input x, const Weights& w) { add_products(sums, x, w); }
};

class Int8Product {
 public:
  using Format = Int8Format;
  using BlockFormat = void;  // nothing to convert, and stretches of the depth cost more than they save

  explicit Int8Product(const LinearInt8Args& args) : args_(args) {}

  const std::byte* weights() const { return reinterpret_cast<const std::byte*>(args_.weight); }
  size_t panel_bytes() const { return num_steps() * Format::kStepBytes; }
  size_t num_steps() const { return (args_.depth + 3) / 4; }
  size_t num_rows() const { return args_.num_rows; }
  const std::byte* rows(size_t first) const { return reinterpret_cast<const std::byte*>(args_.x.row(first)); }
  size_t row_bytes() const { return args_.x.stride; }

  template <size_t R, size_t V, size_t kFirst, Fetch kFetch>
  [[gnu::always_inline]] void accumulate(const TileInput& in, size_t, size_t, QuadSums (&sums)[R * V]) const {
    for (QuadSums& sum : sums) sum = Format::zero();
    multiply<Format, R, V, kFirst, kFetch>(in, sums);
  }

  template <size_t R, size_t V>
  void store(size_t row, size_t column, const QuadSums (&sums)[R * V]) const {
    store_tile<R, V>(args_, row, column, [&](size_t v, size_t at, size_t count) {
      const I32x16 row_sums = load_lanes(args_.weight_row_sum + at, count);
      const F32x16 weight_scale = load_lanes(args_.weight_scale + at, count);
      return [=, this, &sums](size_t r) {
        const F32x16 scale = broadcast(*args_.x_scale.row(row + r)) * weight_scale;
        return to_f32(total(sums[r * V + v], row_sums)) * scale;
      };
    });
  }

 private:
  const LinearInt8Args& args_;
};

}  // namespace

void linear_int8(const LinearInt8Args& args, size_t tactic, size_t panel_begin, size_t panel_end) {
  run_tactic<kInt8Tactics>(Int8Product(args), tactic, panel_begin, panel_end);
}

}  // namespace llmserve::LLMSERVE_VARIANT
