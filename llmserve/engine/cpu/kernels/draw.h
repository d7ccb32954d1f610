// The choice of one token by chance: temperature, top-k, top-p, min-p, one draw.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"
#include "step.h"

namespace llmserve {

constexpr float kNever = -std::numeric_limits<float>::infinity();  // a logit of what is not chosen

// NaN as minus infinity, plus infinity as the largest float.
float cleaned(float logit);

// A row of logits and the largest of each of its blocks.
struct Logits {
  const float* x;
  size_t count;
  const float* peaks;
  size_t num_blocks;
};

// Filters in order, each on what the one before has left. Never sorts more tokens than the filters can leave: the peaks
// of the blocks say which blocks can hold the largest ones.
class Draw {
 public:
  explicit Draw(const KernelTable& kernels) : kernels_(kernels) {}

  // `peak` is the largest logit, that of token `best`, and finite; the request's temperature is positive.
  int32_t choose(const Logits& logits, float peak, int32_t best, const SampleRecord& request);

 private:
  struct Candidate {
    float value;  // logit / temperature, the largest at 0
    int32_t id;
  };

  float value(float logit) const { return (cleaned(logit) - softmax_.peak) / softmax_.temperature; }
  void collect(float least);
  float peak_value(size_t rank);
  void keep_top(size_t count);
  void find_nucleus(float top_p);
  bool cut_nucleus(double wanted);
  void sort();
  double weigh();
  double sum_blocks();
  int32_t from_candidates(double draw);
  int32_t from_blocks(double draw, int32_t best);

  const KernelTable& kernels_;
  Logits logits_ = {};
  Softmax softmax_ = {};
  std::vector<Candidate> candidates_;
  std::vector<Candidate> sorted_;     // scratch of `sort`
  std::vector<float> weights_;        // of the candidates
  std::vector<float> ranked_;         // scratch of selections
  std::vector<double> block_weights_;
};

// A number in [0, 1) that depends on its arguments only (Philox 4x32-10).
double uniform(uint64_t seed, uint64_t position, uint32_t stream);

}  // namespace llmserve
