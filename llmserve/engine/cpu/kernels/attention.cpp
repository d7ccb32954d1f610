// Attention over a paged cache of floats, for prefill and decode.
//
// A tile of queries processes the positions in order, in two passes: all scores, then softmax and the weighted sum of
// values. Both are products of a few rows with a matrix of the cache. Every score and every output is one sequential
// sum, over the dimensions or over the positions that its query sees. A query's result depends only on what the query
// sees; the queries of a tile share the loads of keys and values.
#include "queries.h"
#include "rows.h"
#include "tile.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// One KV head of a plane of the cache.
template <class T>
class Plane {
 public:
  Plane(const std::byte* plane, const AttentionArgs& args, size_t kv_head)
      : head_(plane + kv_head * args.shape.head_bytes()), args_(args), block_bytes_(args.shape.block_bytes()) {}

  const T* block(size_t position) const {
    const auto id = static_cast<size_t>(args_.block_ids[position / args_.shape.block_size]);
    return reinterpret_cast<const T*>(head_ + id * block_bytes_);
  }

 private:
  const std::byte* head_;
  const AttentionArgs& args_;
  const size_t block_bytes_;
};

// sums[n][v] += rows[n][k] * matrix(k, v) for k in [0, depth), in order. Rows are `stride` floats apart.
template <size_t N, size_t V, class Matrix>
[[gnu::always_inline]] inline void multiply_add(const float* rows, size_t stride, size_t depth, Matrix matrix,
                                                F32x16 (&sums)[N * V]) {
  F32x16 local[N * V];  // registers: `sums` is memory
  unroll<N * V>([&](auto i) __attribute__((always_inline)) { local[i] = sums[i]; });
  Cursor<N> cursor(reinterpret_cast<const std::byte*>(rows), stride * sizeof(float));
  for (size_t k = 0; k < depth; ++k) {
    F32x16 columns[V];
    unroll<V>([&](auto v) __attribute__((always_inline)) { columns[v] = matrix(k, v); });
    unroll<N>([&](auto n) __attribute__((always_inline)) {
      const F32x16 factor = broadcast(*reinterpret_cast<const float*>(cursor.at(n)));
      unroll<V>([&](auto v) __attribute__((always_inline)) {
        local[n * V + v] = fma(factor, columns[v], local[n * V + v]);
      });
    });
    cursor.advance(sizeof(float));
  }
  unroll<N * V>([&](auto i) __attribute__((always_inline)) { sums[i] = local[i]; });
}

template <class T>
class Tile {
 public:
  // `length`: an upper bound of the positions that any query of the task sees.
  Tile(const AttentionArgs& args, size_t kv_head, size_t length, float* scratch)
      : args_(args), keys_(args.key_plane, args, kv_head), values_(args.value_plane, args, kv_head),
        row_floats_(attention_row_floats(args.shape.head_dim)), score_stride_(attention_row_floats(length) + 64),
        queries_(scratch), sums_(queries_ + kMaxQueryTile * row_floats_), scores_(sums_ + kMaxQueryTile * row_floats_) {}

  template <size_t N>
  void run(const Query* queries) const {
    const size_t block_size = args_.shape.block_size;
    size_t first = queries[0].first, end = 0;        // positions that any query of the tile sees
    size_t all_first = 0, all_end = queries[0].end;  // positions that all of them see
    for (size_t n = 0; n < N; ++n) {
      take(queries[n], n);
      first = smaller(first, queries[n].first);
      all_end = smaller(all_end, queries[n].end);
      end = larger(end, queries[n].end);
      all_first = larger(all_first, queries[n].first);
    }
    all_first = smaller(all_first, all_end);
    const size_t base = first - first % block_size % kLanes;  // vectors of positions are aligned to those of the block
    score<N>(base, end);
    float totals[N];
    for (size_t n = 0; n < N; ++n) {
      float* scores = scores_ + n * score_stride_ + (queries[n].first - base);
      totals[n] = args_.soft_cap > 0.0f ? softmax<true>(queries[n], scores) : softmax<false>(queries[n], scores);
      weigh<1>(n, base, queries[n].first, all_first);
    }
    weigh<N>(0, base, all_first, all_end);
    for (size_t n = 0; n < N; ++n) {
      weigh<1>(n, base, larger(all_end, queries[n].first), queries[n].end);
      give(queries[n], n, totals[n]);
    }
  }

 private:
  void take(const Query& query, size_t n) const {
    const size_t head_dim = args_.shape.head_dim;
    const float* q = args_.q.row(query.row) + query.head * head_dim;
    float* target = queries_ + n * row_floats_;
    if (args_.rope.data) {
      rotate_head(q, args_.rope.row(query.row), args_.rotary_dim, head_dim, target);
    } else {
      __builtin_memcpy(target, q, head_dim * sizeof(float));
    }
    __builtin_memset(sums_ + n * row_floats_, 0, row_floats_ * sizeof(float));
  }

  void give(const Query& query, size_t n, float total) const {
    const size_t head_dim = args_.shape.head_dim;
    const float* sums = sums_ + n * row_floats_;
    float* y = args_.y.row(query.row) + query.head * head_dim;
    const F32x16 divisor = broadcast(total);
    for_lanes(
        head_dim, [&](size_t i) { store(y + i, load(sums + i) / divisor); },
        [&](size_t i, size_t count) { store_partial(y + i, load(sums + i) / divisor, count); });
  }

  // Computes scores of positions [base, end) in whole vectors, up to the end of the block. Excess scores are not read.
  template <size_t N>
  void score(size_t base, size_t end) const {
    const size_t block_size = args_.shape.block_size;
    for (size_t p = base; p < end;) {
      const size_t place = p % block_size, left = block_size - place;
      const T* keys = keys_.block(p) + place;
      const auto whole = [&](size_t k, size_t v) __attribute__((always_inline)) {
        return load(keys + k * block_size + v * kLanes);
      };
      if (left >= kPositionVectors * kLanes) {
        p += score_vectors<N, kPositionVectors>(p, base, kLanes, whole);
      } else if (left >= kLanes) {
        p += score_vectors<N, 1>(p, base, kLanes, whole);
      } else {
        p += score_vectors<N, 1>(p, base, left, [&](size_t k, size_t) { return load_partial(keys + k * block_size, left); });
      }
    }
  }

  // Computes scores of V vectors of `count` positions each; returns the number of positions.
  template <size_t N, size_t V, class Matrix>
  size_t score_vectors(size_t p, size_t base, size_t count, Matrix matrix) const {
    F32x16 sums[N * V];
    for (F32x16& sum : sums) sum = zero();
    multiply_add<N, V>(queries_, row_floats_, args_.shape.head_dim, matrix, sums);
    for (size_t v = 0; v < V; ++v) {
      float* target = scores_ + (p - base) + v * kLanes;
      for (size_t n = 0; n < N; ++n) store(target + n * score_stride_, sums[n * V + v]);
    }
    return V * count;
  }

  // Converts a query's scores to weights, in place; returns their sum. Lanes count from the query's own first position.
  // Those after its last position contain next to nothing.
  template <bool kSoftCap>
  float softmax(const Query& query, float* scores) const {
    alignas(64) static constexpr float kIota[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const size_t count = query.end - query.first;
    const F32x16 scale = broadcast(args_.scale), lanes = load(kIota);
    const F32x16 slope = broadcast(args_.slopes ? args_.slopes[query.head] : 0.0f);
    F32x16 peak = broadcast(-__builtin_inff());
    for (size_t i = 0; i < count; i += kLanes) {
      const F32x16 distance = broadcast(static_cast<float>(i) - static_cast<float>(count - 1)) + lanes;
      F32x16 score = load(scores + i) * scale;
      if constexpr (kSoftCap) score = soft_capped(score, args_.soft_cap);
      store(scores + i, score + slope * distance);
      for (size_t j = count; j < i + kLanes; ++j) scores[j] = -__builtin_inff();
      peak = max(peak, load(scores + i));
    }
    const float largest = reduce_max(peak), sink = args_.sinks ? args_.sinks[query.head] : -__builtin_inff();
    const F32x16 shift = broadcast(largest > sink ? largest : sink);
    F32x16 sums = zero();
    for (size_t i = 0; i < count; i += kLanes) {
      const F32x16 weights = exp(load(scores + i) - shift);
      store(scores + i, weights);
      sums = sums + weights;
    }
    const float total = reduce_add(sums);
    return args_.sinks ? total + reduce_max(exp(broadcast(sink) - shift)) : total;
  }

  // Adds weight * value to the sums of N queries from the n-th on, for positions [begin, end).
  template <size_t N>
  void weigh(size_t n, size_t base, size_t begin, size_t end) const {
    const size_t head_dim = args_.shape.head_dim, block_size = args_.shape.block_size;
    for (size_t p = begin; p < end;) {
      const size_t run_end = smaller(end, (p / block_size + 1) * block_size);
      const T* values = values_.block(p) + p % block_size * head_dim;
      const float* weights = scores_ + n * score_stride_ + (p - base);
      size_t d = 0;
      for (; d + kValueVectors * kLanes <= head_dim; d += kValueVectors * kLanes) {
        weigh_vectors<N, kValueVectors>(n, d, weights, run_end - p, [&](size_t k, size_t v) __attribute__((always_inline)) {
          return load(values + k * head_dim + d + v * kLanes);
        });
      }
      for (; d + kLanes <= head_dim; d += kLanes) {
        weigh_vectors<N, 1>(n, d, weights, run_end - p, [&](size_t k, size_t) __attribute__((always_inline)) {
          return load(values + k * head_dim + d);
        });
      }
      if (d < head_dim) {
        weigh_vectors<N, 1>(n, d, weights, run_end - p, [&](size_t k, size_t) {
          return load_partial(values + k * head_dim + d, head_dim - d);
        });
      }
      p = run_end;
    }
  }

  template <size_t N, size_t V, class Matrix>
  [[gnu::always_inline]] void weigh_vectors(size_t n, size_t d, const float* weights, size_t count, Matrix matrix) const {
    float* place = sums_ + n * row_floats_ + d;
    F32x16 sums[N * V];
    for (size_t i = 0; i < N * V; ++i) sums[i] = load(place + i / V * row_floats_ + i % V * kLanes);
    multiply_add<N, V>(weights, score_stride_, count, matrix, sums);
    for (size_t i = 0; i < N * V; ++i) store(place + i / V * row_floats_ + i % V * kLanes, sums[i]);
  }

  const AttentionArgs& args_;
  const Plane<T> keys_, values_;
  const size_t row_floats_, score_stride_;
  float* const queries_;  // [kMaxQueryTile][row_floats_]
  float* const sums_;     // [kMaxQueryTile][row_floats_]
  float* const scores_;   // [kMaxQueryTile][score_stride_]; position p is at p - base
};

template <class T>
void attention_of(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch) {
  static_assert(kQueryTile <= kMaxQueryTile);
  static constexpr auto kRuns = []<size_t... I>(std::index_sequence<I...>) {
    return std::array{&Tile<T>::template run<I + 1>...};
  }(std::make_index_sequence<kQueryTile>{});
  const Tile<T> tile(args, kv_head, larger(args.end, args.start + row_end), scratch);
  for_tiles<kQueryTile>(args, kv_head, row_begin, row_end,
                        [&](const Query* queries, size_t count) { (tile.*kRuns[count - 1])(queries); });
}

}  // namespace

void attention(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch) {
  switch (args.shape.type) {
    case DType::kF32:
      return attention_of<float>(args, kv_head, row_begin, row_end, scratch);
    case DType::kF16:
      return attention_of<Half>(args, kv_head, row_begin, row_end, scratch);
    case DType::kBF16:
      return attention_of<BFloat16>(args, kv_head, row_begin, row_end, scratch);
    case DType::kI8:  // see attention_int8
    case DType::kI4:
    case DType::kI5:
    case DType::kI6:
    case DType::kI2:
    case DType::kI3:
      break;
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
