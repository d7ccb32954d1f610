// Loops that do nothing but reach a limit of the machine with this variant's instructions. Each loop is written in
// several ways, because the fastest one depends on the processor.
#include "simd.h"
#include "variant.h"

namespace llmserve::LLMSERVE_VARIANT {
namespace {

// Reads `kStreams` places at once, like a matrix product with several panels in flight; prefetches kAhead bytes ahead.
template <size_t kStreams, size_t kAhead>
float read_streams(const float* data, size_t count) {
  constexpr size_t kVectors = 4;
  const size_t length = count / kStreams;
  F32x16 sums[kVectors] = {zero(), zero(), zero(), zero()};
  for (size_t i = 0; i < length; i += kVectors * kLanes) {
#pragma GCC unroll 4
    for (size_t s = 0; s < kStreams; ++s) {
      const float* place = data + s * length + i;
#pragma GCC unroll 4
      for (size_t v = 0; v < kVectors; ++v) {
        if (kAhead) __builtin_prefetch(reinterpret_cast<const char*>(place + v * kLanes) + kAhead);
        sums[v] = sums[v] + load(place + v * kLanes);
      }
    }
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Independent chains of sums: enough to hide the latency, and few enough to fit the registers.
template <size_t kChains>
float multiply_chains(float seed, size_t rounds) {
  const F32x16 factor = broadcast(seed), term = broadcast(1.0f - seed);
  F32x16 sums[kChains];
#pragma GCC unroll 16
  for (size_t c = 0; c < kChains; ++c) sums[c] = broadcast(static_cast<float>(c));
  for (size_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (size_t c = 0; c < kChains; ++c) sums[c] = fma(sums[c], factor, term);
  }
  F32x16 all = zero();
#pragma GCC unroll 16
  for (size_t c = 0; c < kChains; ++c) all = all + sums[c];
  return reduce_add(all);
}

template <size_t kChains>
int32_t multiply_int8_chains(const int8_t* quad, const uint8_t* weights, size_t rounds) {
  ByteInput x = broadcast_for_bytes(quad);
  const ByteWeights w = load_bytes(weights);
  ByteSums sums[kChains];
#pragma GCC unroll 16
  for (size_t c = 0; c < kChains; ++c) sums[c] = start_bytes(0);
  for (size_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (size_t c = 0; c < kChains; ++c) {
      hide(x);
      add_products(sums[c], x, w);
    }
  }
  F32x16 all = zero();
#pragma GCC unroll 16
  for (size_t c = 0; c < kChains; ++c) all = all + to_f32(total(sums[c]));
  return static_cast<int32_t>(reduce_add(all));
}

uint64_t read(const LimitInput& input, size_t way) {
  using Loop = float (*)(const float*, size_t);
  constexpr Loop kLoops[] = {read_streams<1, 0>, read_streams<1, 2048>, read_streams<4, 0>, read_streams<4, 1024>};
  *input.sink = kLoops[way % std::size(kLoops)](input.data, input.count);
  return input.count * sizeof(float);
}

uint64_t multiply(const LimitInput& input, size_t way) {
  using Loop = float (*)(float, size_t);
  constexpr Loop kLoops[] = {multiply_chains<5>, multiply_chains<8>, multiply_chains<12>, multiply_chains<16>};
  constexpr size_t kChains[] = {5, 8, 12, 16};
  *input.sink = kLoops[way % std::size(kLoops)](input.factor, input.count);
  return input.count * kChains[way % std::size(kLoops)] * kLanes;
}

uint64_t multiply_int8(const LimitInput& input, size_t way) {
  using Loop = int32_t (*)(const int8_t*, const uint8_t*, size_t);
  constexpr Loop kLoops[] = {multiply_int8_chains<3>, multiply_int8_chains<6>, multiply_int8_chains<10>,
                             multiply_int8_chains<16>};
  constexpr size_t kChains[] = {3, 6, 10, 16};
  *input.sink = static_cast<float>(kLoops[way % std::size(kLoops)](input.quad, input.weights, input.count));
  return input.count * kChains[way % std::size(kLoops)] * kLanes * 4;
}

}  // namespace

const LimitLoops kLimitLoops = {read, multiply, multiply_int8};

}  // namespace llmserve::LLMSERVE_VARIANT
