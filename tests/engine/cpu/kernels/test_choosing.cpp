// Several threads choose tokens from pieces of logits while masks are made; the tokens must equal those of one chooser.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "choosing.h"
#include "test_support.h"

namespace llmserve {
namespace {

constexpr size_t kVocabulary = 300, kRows = 40;
constexpr uint32_t kMaskWords = (kVocabulary + kMaskBits - 1) / kMaskBits;

// A step that requests a token of every row, log-probs, likely tokens and masks of some, and the logits of one.
struct Asked {
  Guarded<SampleRecord> samples{kRows};
  Guarded<uint32_t> mask_words{kMaskWords};
  Guarded<int32_t> tokens{kRows}, top_ids{2 * kRows};
  Guarded<double> log_probs{kRows}, top_log_probs{2 * kRows};
  Guarded<uint32_t> kept{1};
  Guarded<float> kept_logits{kVocabulary};
  uint32_t masks_ready = 0;
  StepRecord step = {};

  Asked() {
    for (uint32_t i = 0; i < kRows; ++i) {
      SampleRecord& request = samples.data()[i];
      request = {};
      request.seed = i;
      request.selected = i;
      request.temperature = i % 3 == 0 ? 0.0f : 0.9f;
      request.top_p = i % 4 == 0 ? 0.8f : 1.0f;
      request.repetition_penalty = 1.0f;
      request.want_log_prob = i % 2;
      request.num_top = i % 5 == 0 ? 2 : 0;
      request.first_top = 2 * i;
      request.first_mask = i % 7 == 0 ? 0 : kNoMask;
    }
    std::fill_n(mask_words.data(), kMaskWords, 0u);
    kept.data()[0] = 17;
    step.samples = samples.data();
    step.mask_words = mask_words.data();
    step.masks_ready = &masks_ready;
    step.tokens = tokens.data();
    step.log_probs = log_probs.data();
    step.top_ids = top_ids.data();
    step.top_log_probs = top_log_probs.data();
    step.kept_rows = kept.data();
    step.logits = kept_logits.data();
    step.num_selected = step.num_samples = kRows;
    step.num_top = 2 * kRows;
    step.num_kept = 1;
    step.num_mask_words = kMaskWords;
  }

  // Makes the masks, some time after choosing has begun: every second token may be drawn.
  void make_masks() {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::fill_n(mask_words.data(), kMaskWords, 0xaaaaaaaau);
    __atomic_store_n(&masks_ready, 1u, __ATOMIC_RELEASE);
  }
};

}  // namespace

void test_choosing(const KernelTable& k, Random& random) {
  const std::vector<float> logits = random.numbers(kRows * kVocabulary);
  const Guarded<float> rows(logits);
  Asked wanted;
  wanted.make_masks();
  ChooserPool one(k, kVocabulary, 1);
  expect(!one.choose(wanted.step, rows.data(), 0, kRows), k.name, "choosing at once", kRows);
  for (uint32_t i = 0; i < kRows; i += 7) expect(wanted.tokens.data()[i] % 2 == 1, k.name, "choosing under a mask", i);
  expect(std::equal(wanted.kept_logits.data(), wanted.kept_logits.data() + kVocabulary, &logits[17 * kVocabulary]), k.name,
         "logits that come back", kVocabulary);
  for (unsigned threads : {1u, 2u, 5u}) {
    ChooserPool pool(k, kVocabulary, threads);
    for (size_t piece : {size_t{1}, size_t{7}, kRows}) {
      Asked asked;
      std::thread maker([&] { asked.make_masks(); });
      bool is_well = true;
      for (size_t begin = 0; begin < kRows; begin += piece) {
        const size_t count = std::min(piece, kRows - begin);
        is_well = is_well && !pool.choose(asked.step, rows.data() + begin * kVocabulary, begin, count);
      }
      maker.join();
      is_well = is_well && std::memcmp(asked.tokens.data(), wanted.tokens.data(), kRows * sizeof(int32_t)) == 0;
      for (size_t i = 1; i < kRows; i += 2) is_well = is_well && asked.log_probs.data()[i] == wanted.log_probs.data()[i];
      for (size_t i = 0; i < kRows; i += 5) {
        is_well = is_well && asked.top_ids.data()[2 * i + 1] == wanted.top_ids.data()[2 * i + 1] &&
                  asked.top_log_probs.data()[2 * i] == wanted.top_log_probs.data()[2 * i];
      }
      expect(is_well, k.name, "choosing in pieces by several threads", threads);
    }
    Asked beyond;
    beyond.masks_ready = 1;
    expect(static_cast<bool>(pool.choose(beyond.step, rows.data(), 1, kRows)), k.name, "a piece beyond the step", threads);
  }
}

}  // namespace llmserve
