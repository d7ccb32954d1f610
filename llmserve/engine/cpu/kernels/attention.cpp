// Causal attention over the paged cache, prefill and decode alike.
//
// Each query walks the positions it may see in order, in two passes: all scores, then softmax and the weighted sum of
// values. What one query computes depends on its own position only; a tile of queries merely shares the loads of keys
// and values.
#include "simd.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// Query i of a tile: one head of one row, and the positions [first, end) that it sees.
struct Query {
  const float* q;
  float* y;
  size_t first;
  size_t end;
  float slope;
  float* scores;  // of position p at scores[p - base]
  float* sums;    // [head_dim]
};

template <class T>
struct Cache {
  const AttentionArgs& args;
  const T* pool;
  size_t kv_head;

  // The cache row of position p; the rows of the same block follow it.
  const T* row(size_t p) const {
    const size_t block = static_cast<size_t>(args.block_ids[p / args.block_size]);
    const size_t row = (block * args.num_kv_heads + kv_head) * args.block_size + p % args.block_size;
    return pool + row * args.head_dim;
  }

  // fn(p, end, row of p) for every run of positions inside one block.
  template <class Fn>
  void for_runs(size_t begin, size_t end, Fn fn) const {
    for (size_t p = begin; p < end;) {
      const size_t run_end = smaller(end, (p / args.block_size + 1) * args.block_size);
      fn(p, run_end, row(p));
      p = run_end;
    }
  }
};

// scores of P consecutive positions for N queries
template <size_t N, size_t P, class T>
[[gnu::always_inline]] inline void dot(const Query* queries, const T* keys, size_t head_dim, size_t index) {
  F32x16 sums[N * P];
  for (auto& sum : sums) sum = zero();
  size_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    F32x16 key[P];
    for (size_t p = 0; p < P; ++p) key[p] = load(keys + p * head_dim + d);
    for (size_t n = 0; n < N; ++n) {
      const F32x16 q = load(queries[n].q + d);
      for (size_t p = 0; p < P; ++p) sums[n * P + p] = fma(q, key[p], sums[n * P + p]);
    }
  }
  if (d < head_dim) {
    for (size_t p = 0; p < P; ++p) {
      const F32x16 key = load_partial(keys + p * head_dim + d, head_dim - d);
      for (size_t n = 0; n < N; ++n) {
        sums[n * P + p] = fma(load_partial(queries[n].q + d, head_dim - d), key, sums[n * P + p]);
      }
    }
  }
  for (size_t n = 0; n < N; ++n) {
    if constexpr (P == 4) {
      reduce_add4(sums + n * P, queries[n].scores + index);
    } else {
      for (size_t p = 0; p < P; ++p) queries[n].scores[index + p] = reduce_add(sums[n * P + p]);
    }
  }
}

template <size_t N, class T>
void score(const Query* queries, const Cache<T>& keys, size_t base, size_t end) {
  constexpr size_t kPositions = kScoreTile >= 4 ? 4 : (N == 1 ? 4 : N == 2 ? 2 : 1);
  const size_t head_dim = keys.args.head_dim;
  keys.for_runs(base, end, [&](size_t p, size_t run_end, const T* row) {
    for (; p + kPositions <= run_end; p += kPositions, row += kPositions * head_dim) {
      dot<N, kPositions>(queries, row, head_dim, p - base);
    }
    for (; p < run_end; ++p, row += head_dim) dot<N, 1>(queries, row, head_dim, p - base);
  });
}

// Scaled and biased scores, in place; returns the largest.
float scale_scores(float* s, size_t count, float scale, float slope) {
  alignas(64) static constexpr float kIota[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32x16 lanes = load(kIota);
  F32x16 peak = broadcast(-__builtin_inff());
  const auto biased = [&](F32x16 raw, size_t i) {
    const float distance = static_cast<float>(i) - static_cast<float>(count - 1);
    return raw * broadcast(scale) + broadcast(slope) * (broadcast(distance) + lanes);
  };
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F32x16 value = biased(load(s + i), i);
    store(s + i, value);
    peak = max(peak, value);
  }
  float largest = reduce_max(peak);
  if (i < count) store_partial(s + i, biased(load_partial(s + i, count - i), i), count - i);
  for (; i < count; ++i) largest = s[i] > largest ? s[i] : largest;
  return largest;
}

// Scores to weights, in place; returns their sum. Lanes count from the query's own first position.
float softmax(const Query& query, size_t base, float scale) {
  float* s = query.scores + (query.first - base);
  const size_t count = query.end - query.first;
  const F32x16 shift = broadcast(scale_scores(s, count, scale, query.slope));
  F32x16 sums = zero();
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const F32x16 weights = exp(load(s + i) - shift);
    store(s + i, weights);
    sums = sums + weights;
  }
  if (i < count) {
    store_partial(s + i, exp(load_partial(s + i, count - i) - shift), count - i);
    sums = sums + load_partial(s + i, count - i);
  }
  return reduce_add(sums);
}

// sums[d .. d + 16 B) += weight * value for N queries over positions [begin, end) of one run
template <size_t N, size_t B, class T>
[[gnu::always_inline]] inline void weigh_run(const Query* queries, const T* values, size_t head_dim, size_t d,
                                             size_t index, size_t count) {
  F32x16 sums[N * B];
  for (size_t n = 0; n < N; ++n) {
    for (size_t b = 0; b < B; ++b) sums[n * B + b] = load(queries[n].sums + d + b * kLanes);
  }
  for (size_t p = 0; p < count; ++p) {
    F32x16 value[B];
    for (size_t b = 0; b < B; ++b) value[b] = load(values + p * head_dim + d + b * kLanes);
    for (size_t n = 0; n < N; ++n) {
      const F32x16 weight = broadcast(queries[n].scores[index + p]);
      for (size_t b = 0; b < B; ++b) sums[n * B + b] = fma(weight, value[b], sums[n * B + b]);
    }
  }
  for (size_t n = 0; n < N; ++n) {
    for (size_t b = 0; b < B; ++b) store(queries[n].sums + d + b * kLanes, sums[n * B + b]);
  }
}

template <size_t N, class T>
void weigh_rest(const Query* queries, const T* values, size_t head_dim, size_t d, size_t index, size_t count) {
  for (size_t n = 0; n < N; ++n) {
    F32x16 sum = load(queries[n].sums + d);
    for (size_t p = 0; p < count; ++p) {
      const F32x16 value = load_partial(values + p * head_dim + d, head_dim - d);
      sum = fma(broadcast(queries[n].scores[index + p]), value, sum);
    }
    store(queries[n].sums + d, sum);
  }
}

template <size_t N, class T>
void weigh(const Query* queries, const Cache<T>& values, size_t base, size_t begin, size_t end) {
  constexpr size_t kVectors = 2;
  const size_t head_dim = values.args.head_dim;
  values.for_runs(begin, end, [&](size_t p, size_t run_end, const T* row) {
    size_t d = 0;
    for (; d + kVectors * kLanes <= head_dim; d += kVectors * kLanes) {
      weigh_run<N, kVectors>(queries, row, head_dim, d, p - base, run_end - p);
    }
    for (; d + kLanes <= head_dim; d += kLanes) weigh_run<N, 1>(queries, row, head_dim, d, p - base, run_end - p);
    if (d < head_dim) weigh_rest<N>(queries, row, head_dim, d, p - base, run_end - p);
  });
}

template <size_t N, class T>
void tile(Query* queries, const Cache<T>& keys, const Cache<T>& values) {
  size_t base = queries[0].first, end = 0;          // what any query of the tile sees
  size_t all_first = 0, all_end = queries[0].end;  // what all of them see
  for (size_t n = 0; n < N; ++n) {
    base = smaller(base, queries[n].first);
    all_end = smaller(all_end, queries[n].end);
    end = queries[n].end > end ? queries[n].end : end;
    all_first = queries[n].first > all_first ? queries[n].first : all_first;
  }
  if (all_first > all_end) all_first = all_end;
  score<N>(queries, keys, base, end);
  float totals[N];
  const size_t head_dim = keys.args.head_dim;
  for (size_t n = 0; n < N; ++n) {
    totals[n] = softmax(queries[n], base, keys.args.scale);
    __builtin_memset(queries[n].sums, 0, (head_dim + kLanes - 1) / kLanes * kLanes * sizeof(float));
    weigh<1>(queries + n, values, base, queries[n].first, all_first);
  }
  weigh<N>(queries, values, base, all_first, all_end);
  for (size_t n = 0; n < N; ++n) {
    weigh<1>(queries + n, values, base, all_end > queries[n].first ? all_end : queries[n].first, queries[n].end);
    for (size_t d = 0; d < head_dim; ++d) queries[n].y[d] = queries[n].sums[d] / totals[n];
  }
}

template <class T>
void attention_of(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch) {
  const Cache<T> keys{args, static_cast<const T*>(args.keys), kv_head};
  const Cache<T> values{args, static_cast<const T*>(args.values), kv_head};
  const size_t group = args.num_heads / args.num_kv_heads;
  const size_t sums_stride = (args.head_dim + kLanes - 1) / kLanes * kLanes;
  const size_t score_stride = (args.start + row_end + kLanes - 1) / kLanes * kLanes;
  const size_t index_end = row_end * group;
  for (size_t index = row_begin * group; index < index_end;) {
    const size_t count = smaller(kQueryTile, index_end - index);
    Query queries[kQueryTile];
    for (size_t n = 0; n < count; ++n) {
      const size_t row = (index + n) / group, head = kv_head * group + (index + n) % group;
      const size_t end = args.start + row + 1;
      queries[n] = {
          .q = args.q.row(row) + head * args.head_dim,
          .y = args.y.row(row) + head * args.head_dim,
          .first = args.window && end > args.window ? end - args.window : 0,
          .end = end,
          .slope = args.slopes ? args.slopes[head] : 0.0f,
          .scores = scratch + kQueryTile * sums_stride + n * score_stride,
          .sums = scratch + n * sums_stride,
      };
    }
    if (count == 4) tile<4>(queries, keys, values);
    if (count == 3) tile<3>(queries, keys, values);
    if (count == 2) tile<2>(queries, keys, values);
    if (count == 1) tile<1>(queries, keys, values);
    index += count;
  }
}

}  // namespace

void attention(const AttentionArgs& args, size_t kv_head, size_t row_begin, size_t row_end, float* scratch) {
  switch (args.cache_type) {
    case DType::kF32:
      return attention_of<float>(args, kv_head, row_begin, row_end, scratch);
    case DType::kF16:
      return attention_of<Half>(args, kv_head, row_begin, row_end, scratch);
    default:
      return attention_of<BFloat16>(args, kv_head, row_begin, row_end, scratch);
  }
}

}  // namespace llmserve::LLMSERVE_VARIANT
