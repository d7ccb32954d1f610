// Draws one token at random: temperature, top-k, top-p, min-p, one draw.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"
#include "step.h"

namespace llmserve {

constexpr float kNever = -std::numeric_limits<float>::infinity();  // the logit of a token that is never chosen

// Returns the logit; NaN becomes minus infinity, plus infinity the largest float.
float cleaned(float logit);

// A row of logits, and the largest logit of each of its blocks.
struct Logits {
  const float* x;
  size_t count;
  const float* peaks;
  size_t num_blocks;
};

// Applies the filters in order, each to the tokens that the previous one kept. Never sorts more tokens than the filters
// can keep: the peaks of blocks show which blocks can contain the largest logits.
class Draw {
 public:
  explicit Draw(const KernelTable& kernels) : kernels_(kernels) {}

  // `peak`: the largest logit, which is finite; `best`: its token. The request's temperature is positive.
  int32_t choose(const Logits& logits, float peak, int32_t best, const SampleRecord& request);

 private:
  struct Candidate {
    float value;  // logit / temperature, shifted so that the largest is 0
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
  std::vector<float> weights_;        // weight of each candidate
  std::vector<float> ranked_;         // scratch of selections
  std::vector<double> block_weights_;
};

// A number in [0, 1) that depends on its arguments only (Philox 4x32-10).
double uniform(uint64_t seed, uint64_t position, uint32_t stream);

}  // namespace llmserve
