// Attention over a paged cache of integers, for prefill and decode, with products of bytes as in the linear layers.
//
// Queries are mixed and rounded to eight bits like keys, with a scale for every thirty-two dimensions. A position's
// weight times the scale of its value becomes a share: an integer of fourteen bits, in two digits of seven bits. The
// shares of a chunk have one scale. Sums within a group of dimensions, or of one digit of a chunk, are exact integers;
// groups and chunks are added in order.
//
// A tile of queries processes the positions in chunks, which begin at multiples of kChunkPositions: scores, weights
// relative to the largest score so far, shares, sums. A query's result depends only on its own position: its shares are
// zero in panels and chunks that it does not see, and change no sum.
#include "mixing.h"
#include "panels.h"
#include "queries.h"
#include "rows.h"
#include "tile.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

constexpr size_t kPanelVectors = kPanelPositions / kLanes;
constexpr size_t kStepsPerGroup = kQuantizedGroup / 4;
constexpr size_t kStepsPerPanel = kPanelPositions / 4;
constexpr size_t kScoreStride = kChunkPositions + 16;      // floats; not a multiple of a page or half a page
constexpr size_t kShareStride = kChunkPositions + 64;      // bytes
constexpr size_t kDigits = 2;                              // digits of a share
constexpr float kDigitBase = 128.0f;
constexpr float kMostShares = kDigitBase * kDigitBase - 1.0f;
constexpr float kLog2E = 1.44269504f;
constexpr float kTiny = 0x1p-100f;  // chunks whose largest share is smaller count as zero
static_assert(kByteQueryTile <= kMaxByteQueryTile && kPanelVectors % kByteVectors == 0);

// 2^x for x <= 0, to three parts in a million; the results are rounded to 14 bits. Saturates at 2^-126; NaN stays NaN.
inline F32x16 exp2_of(F32x16 x) {
  x = max(broadcast(-126.0f), x);
  const F32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
  const F32x16 shifted = x + magic;
  const F32x16 r = x - (shifted - magic);
  F32x16 p = broadcast(0.00958281338f);
  p = fma(p, r, broadcast(0.05590643f));
  p = fma(p, r, broadcast(0.240240996f));
  p = fma(p, r, broadcast(0.693124193f));
  p = fma(p, r, broadcast(1.0f));
  return p * pow2_of_magic(shifted);
}

// Panels [begin, end) of the chunk whose first panel is `origin`.
struct Stretch {
  size_t origin, begin, end;
};

class ByteTile {
 public:
  // `length`: an upper bound of the positions that any query of the task sees.
  ByteTile(const AttentionArgs& args, size_t kv_head, size_t length, Scratch scratch)
      : args_(args), width_(attention_row_floats(args.shape.head_dim)),
        num_groups_(num_quantized_groups(args.shape.head_dim)), panels_(args, kv_head, length, scratch),
        turned_(scratch.take(width_)), queries_(scratch.take_as<int8_t>(kMaxByteQueryTile * width_)),
        query_scales_(scratch.take(kMaxByteQueryTile * num_groups_)),
        offsets_(scratch.take_as<int32_t>(kMaxByteQueryTile * num_groups_)),
        sums_(scratch.take(kMaxByteQueryTile * width_)), totals_(scratch.take(kMaxByteQueryTile * kLanes)),
        peaks_(scratch.take(kMaxByteQueryTile)), scores_(scratch.take(kMaxByteQueryTile * kScoreStride)),
        shares_(scratch.take_as<uint8_t>(kDigits * kMaxByteQueryTile * kShareStride)),
        share_scales_(scratch.take(kMaxByteQueryTile)), value_scales_(scratch.take(kChunkPositions)) {}

  template <size_t N>
  void run(const Query* queries) const {
    size_t first = queries[0].first, end = 0;  // positions that any query of the tile sees
    for (size_t n = 0; n < N; ++n) {
      take(queries[n], n);
      first = smaller(first, queries[n].first);
      end = larger(end, queries[n].end);
    }
    for (size_t chunk = first / kChunkPositions; chunk * kChunkPositions < end; ++chunk) {
      const Stretch stretch = seen(chunk * kPanelsPerChunk, first, end);
      score<N>(stretch);
      Panel<int8_t> values[kPanelsPerChunk];
      take_values(stretch, values);
      for (size_t n = 0; n < N; ++n) share_out(queries[n], n, stretch);
      weigh<N>(values, stretch);
    }
    for (size_t n = 0; n < N; ++n) give(queries[n], n);
  }

 private:
  // Returns the panels with positions [first, end) of the chunk that begins with panel `origin`.
  static Stretch seen(size_t origin, size_t first, size_t end) {
    const size_t begin = larger(origin, first / kPanelPositions);
    const size_t stop = smaller(origin + kPanelsPerChunk, (end + kPanelPositions - 1) / kPanelPositions);
    return {origin, begin, larger(begin, stop)};
  }

  // Prepares a query. Its scales include the factor of all scores, which are exponents of two if there is no soft cap.
  void take(const Query& query, size_t n) const {
    const size_t head_dim = args_.shape.head_dim;
    const float* q = args_.q.row(query.row) + query.head * head_dim;
    if (args_.rope.data) {
      rotate_head(q, args_.rope.row(query.row), args_.rotary_dim, head_dim, turned_);
      q = turned_;
    }
    mix_head<true>(q, head_dim, turned_);
    float* scales = query_scales_ + n * num_groups_;
    quantize_groups(turned_, head_dim, kZeroPoint, queries_ + n * width_, scales, offsets_ + n * num_groups_);
    const float factor = args_.soft_cap > 0.0f ? args_.scale : args_.scale * kLog2E;
    for (size_t g = 0; g < num_groups_; ++g) scales[g] *= factor;
    __builtin_memset(sums_ + n * width_, 0, width_ * sizeof(float));
    __builtin_memset(totals_ + n * kLanes, 0, kLanes * sizeof(float));
    peaks_[n] = -__builtin_inff();
    if (args_.sinks) {  // counts as a position before all others
      peaks_[n] = args_.sinks[query.head] * kLog2E;
      totals_[n * kLanes] = 1.0f;
    }
  }

  void give(const Query& query, size_t n) const {
    const float* sums = sums_ + n * width_;
    float* y = args_.y.row(query.row) + query.head * args_.shape.head_dim;
    const F32x16 divisor = broadcast(reduce_add(load(totals_ + n * kLanes)));
    const auto value = [&](size_t i) { return load(sums + i) / divisor + zero(); };  // -0 to 0, as chunks of zeros do
    for_lanes(
        args_.shape.head_dim, [&](size_t i) { store(y + i, value(i)); },
        [&](size_t i, size_t count) { store_partial(y + i, value(i), count); });
  }

  template <size_t N>
  void score(const Stretch& stretch) const {
    for (size_t panel = stretch.begin; panel < stretch.end; ++panel) {
      const Panel<uint8_t> keys = panels_.keys(panel);
      float* scores = scores_ + (panel - stretch.origin) * kPanelPositions;
      for (size_t v = 0; v < kPanelVectors; v += kByteVectors) {
        score_group<N, true>(keys, 0, v, scores);
        for (size_t g = 1; g < num_groups_; ++g) score_group<N, false>(keys, g, v, scores);
      }
    }
  }

  void take_values(const Stretch& stretch, Panel<int8_t>* values) const {
    for (size_t panel = stretch.begin; panel < stretch.end; ++panel) {
      const size_t index = panel - stretch.origin;
      values[index] = panels_.values(panel);
      float* scales = value_scales_ + index * kPanelPositions;
      __builtin_memcpy(scales, values[index].scales, kPanelPositions * sizeof(float));
    }
  }

  // Adds the contribution of one group of dimensions to the scores of vectors [first, first + kByteVectors) of a panel.
  template <size_t N, bool kFirst>
  [[gnu::always_inline]] void score_group(const Panel<uint8_t>& keys, size_t g, size_t first, float* scores) const {
    constexpr size_t V = kByteVectors;
    ByteSums exact[N * V];
    unroll<N>([&](auto n) __attribute__((always_inline)) {
      const ByteSums start = start_bytes(offsets_[n * num_groups_ + g]);
      unroll<V>([&](auto v) __attribute__((always_inline)) { exact[n * V + v] = start; });
    });
    const size_t begin = g * kStepsPerGroup, steps = smaller((args_.shape.head_dim + 3) / 4 - begin, kStepsPerGroup);
    Cursor<N> rows(reinterpret_cast<const std::byte*>(queries_ + 4 * begin), width_);
    const uint8_t* columns = keys.elements + begin * keys.step_bytes + 4 * kLanes * first;
    for (size_t step = steps; step > 0; --step) {
      ByteWeights weights[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) { weights[v] = load_bytes(columns + 4 * kLanes * v); });
      unroll<N>([&](auto n) __attribute__((always_inline)) {
        const ByteInput x = broadcast_for_bytes(reinterpret_cast<const int8_t*>(rows.at(n)));
        unroll<V>([&](auto v) __attribute__((always_inline)) { add_products(exact[n * V + v], x, weights[v]); });
      });
      rows.advance(4);
      columns += keys.step_bytes;
    }
    unroll<V>([&](auto v) __attribute__((always_inline)) {
      const F32x16 key_scales = load(keys.scales + g * keys.scale_stride + (first + v) * kLanes);
      unroll<N>([&](auto n) __attribute__((always_inline)) {
        float* place = scores + n * kScoreStride + (first + v) * kLanes;
        const F32x16 sum = to_f32(total(exact[n * V + v])) * broadcast(query_scales_[n * num_groups_ + g]);
        store(place, fma(sum, key_scales, kFirst ? zero() : load(place)));
      });
    });
  }

  // Converts a query's scores to shares; scales its previous sums relative to the new peak.
  void share_out(const Query& query, size_t n, const Stretch& stretch) const {
    const Stretch own = seen(stretch.origin, query.first, query.end);
    for (size_t panel = stretch.begin; panel < stretch.end; ++panel) {
      if (own.begin <= panel && panel < own.end) continue;
      for (size_t digit = 0; digit < kDigits; ++digit) {
        __builtin_memset(shares_of(digit, n) + (panel - stretch.origin) * kPanelPositions, 0, kPanelPositions);
      }
    }
    share_scales_[n] = 0.0f;
    if (own.begin == own.end) return;
    if (args_.soft_cap > 0.0f) bend(n, own);
    if (args_.slopes) slope(query, n, own);
    hide(query, n, own);
    F32x16 top = broadcast(-__builtin_inff());
    const float* scores = scores_ + n * kScoreStride;
    for_vectors(own, [&](size_t i) { top = max(top, load(scores + i)); });
    const float peak = larger_of(peaks_[n], reduce_max(top));
    const F32x16 factor = exp2_of(broadcast(peaks_[n]) - broadcast(peak));
    float* sums = sums_ + n * width_;
    for (size_t d = 0; d < width_; d += kLanes) store(sums + d, load(sums + d) * factor);
    F32x16 total = load(totals_ + n * kLanes) * factor, most = zero();
    for (size_t panel = own.begin; panel < own.end; ++panel) weigh_panel(query, n, panel, own, broadcast(peak), total, most);
    store(totals_ + n * kLanes, total);
    peaks_[n] = peak;
    round_shares(n, own, reduce_max(most));
  }

  // Converts a panel's scores to weights, adds these to `total`, and multiplies them by the values' scales, in place.
  void weigh_panel(const Query& query, size_t n, size_t panel, const Stretch& own, F32x16 peak, F32x16& total,
                   F32x16& most) const {
    const size_t begin = panel * kPanelPositions, place = begin - own.origin * kPanelPositions;
    float* scores = scores_ + n * kScoreStride + place;
    const float* scales = value_scales_ + place;
    alignas(64) float shown[kPanelPositions];
    if (query.first > begin || query.end < begin + kPanelPositions) {
      for (size_t i = 0; i < kPanelPositions; ++i) {
        shown[i] = begin + i >= query.first && begin + i < query.end ? scales[i] : 0.0f;
      }
      scales = shown;
    }
    for (size_t v = 0; v < kPanelPositions; v += kLanes) {
      const F32x16 weights = exp2_of(load(scores + v) - peak), scaled = weights * load(scales + v);
      total = total + weights;
      most = max(most, scaled);
      store(scores + v, scaled);
    }
  }

  void round_shares(size_t n, const Stretch& own, float most) const {
    const F32x16 inverse = broadcast(most > kTiny ? kMostShares / most : 0.0f);
    const float* scores = scores_ + n * kScoreStride;
    uint8_t* high = shares_of(0, n);
    uint8_t* low = shares_of(1, n);
    for_vectors(own, [&](size_t i) { store_digits(high + i, low + i, load(scores + i) * inverse); });
    share_scales_[n] = most * (1.0f / kMostShares);
  }

  // Calls fn(index in the chunk) for each vector of a query's own panels.
  template <class Fn>
  static void for_vectors(const Stretch& own, Fn fn) {
    const size_t begin = (own.begin - own.origin) * kPanelPositions, end = (own.end - own.origin) * kPanelPositions;
    for (size_t i = begin; i < end; i += kLanes) fn(i);
  }

  void bend(size_t n, const Stretch& own) const {
    float* scores = scores_ + n * kScoreStride;
    for_vectors(own, [&](size_t i) {
      store(scores + i, soft_capped(load(scores + i), args_.soft_cap) * broadcast(kLog2E));
    });
  }

  // ALiBi: adds the slope times the distance from the query's own position.
  void slope(const Query& query, size_t n, const Stretch& own) const {
    alignas(64) static constexpr float kIota[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F32x16 slope = broadcast(args_.slopes[query.head] * kLog2E), lanes = load(kIota);
    const float distance = static_cast<float>(own.origin * kPanelPositions) - static_cast<float>(query.end - 1);
    float* scores = scores_ + n * kScoreStride;
    for_vectors(own, [&](size_t i) {
      store(scores + i, load(scores + i) + slope * (broadcast(distance + static_cast<float>(i)) + lanes));
    });
  }

  // Hides the positions of the query's first and last panel that it does not see.
  void hide(const Query& query, size_t n, const Stretch& own) const {
    float* scores = scores_ + n * kScoreStride;
    const size_t origin = own.origin * kPanelPositions;
    for (size_t p = own.begin * kPanelPositions; p < query.first; ++p) scores[p - origin] = -__builtin_inff();
    for (size_t p = query.end; p < own.end * kPanelPositions; ++p) scores[p - origin] = -__builtin_inff();
  }

  uint8_t* shares_of(size_t digit, size_t n) const { return shares_ + (digit * kMaxByteQueryTile + n) * kShareStride; }

  static float larger_of(float a, float b) { return a > b ? a : b; }

  // Adds shares times values to the sums.
  template <size_t N>
  void weigh(const Panel<int8_t>* values, const Stretch& stretch) const {
    size_t d = 0;
    for (; d + kByteVectors * kLanes <= width_; d += kByteVectors * kLanes) {
      for (size_t digit = 0; digit < kDigits; ++digit) weigh_digit<N, kByteVectors>(values, stretch, digit, d);
    }
    for (size_t digit = 0; d < width_ && digit < kDigits; ++digit) weigh_digit<N, 1>(values, stretch, digit, d);
  }

  // Adds one panel's part of the sums in weigh_digit; advances `rows`.
  template <size_t N, size_t V>
  [[gnu::always_inline]] static void add_panel(Cursor<N>& rows, const int8_t* columns, size_t step_bytes,
                                               ByteSums (&exact)[N * V]) {
#pragma GCC unroll 8
    for (size_t step = 0; step < kStepsPerPanel; ++step) {
      SignedBytes elements[V];
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        elements[v] = load_signed_bytes(columns + 4 * kLanes * v);
      });
      unroll<N>([&](auto n) __attribute__((always_inline)) {
        const ShareInput x = broadcast_shares(reinterpret_cast<const uint8_t*>(rows.at(n)));
        unroll<V>([&](auto v) __attribute__((always_inline)) { add_products(exact[n * V + v], x, elements[v]); });
      });
      rows.advance(4);
      columns += step_bytes;
    }
  }

  // Adds one digit for dimensions [d, d + V * kLanes). Sums of one digit of all shares of a chunk fit in 23 bits.
  template <size_t N, size_t V>
  void weigh_digit(const Panel<int8_t>* values, const Stretch& stretch, size_t digit, size_t d) const {
    ByteSums exact[N * V];
    unroll<N * V>([&](auto i) __attribute__((always_inline)) { exact[i] = start_bytes(0); });
    const size_t offset = (stretch.begin - stretch.origin) * kPanelPositions;
    Cursor<N> rows(reinterpret_cast<const std::byte*>(shares_of(digit, 0) + offset), kShareStride);
    for (size_t panel = stretch.begin; panel < stretch.end; ++panel) {
      const Panel<int8_t>& source = values[panel - stretch.origin];
      add_panel<N, V>(rows, source.elements + 4 * d, source.step_bytes, exact);
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
      const F32x16 scale = broadcast(digit == 0 ? share_scales_[n] * kDigitBase : share_scales_[n]);
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        float* place = sums_ + n * width_ + d + v * kLanes;
        store(place, fma(to_f32(total(exact[n * V + v])), scale, load(place)));
      });
    });
  }

  const AttentionArgs& args_;
  const size_t width_, num_groups_;  // of a head; its width is padded to whole vectors
  const Panels panels_;
  float* const turned_;
  int8_t* const queries_;        // [kMaxByteQueryTile][width_]
  float* const query_scales_;    // [kMaxByteQueryTile][num_groups_]
  int32_t* const offsets_;       // [kMaxByteQueryTile][num_groups_]
  float* const sums_;            // [kMaxByteQueryTile][width_]
  float* const totals_;          // [kMaxByteQueryTile][kLanes], of weights
  float* const peaks_;           // [kMaxByteQueryTile], of scores
  float* const scores_;          // [kMaxByteQueryTile][kScoreStride], of a chunk
  uint8_t* const shares_;        // [kDigits][kMaxByteQueryTile][kShareStride]
  float* const share_scales_;
  float* const value_scales_;    // [kChunkPositions], of a chunk
};

}  // namespace

void attention_int8(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch) {
  static constexpr auto kRuns = []<size_t... I>(std::index_sequence<I...>) {
    return std::array{&ByteTile::run<I + 1>...};
  }(std::make_index_sequence<kByteQueryTile>{});
  const ByteTile tile(args, kv_head, larger(args.end, args.start + row_end), Scratch(scratch));
  for_tiles<kByteQueryTile>(args, kv_head, row_begin, row_end,
                            [&](const Query* queries, size_t count) { (tile.*kRuns[count - 1])(queries); });
}

}  // namespace llmserve::LLMSERVE_VARIANT
