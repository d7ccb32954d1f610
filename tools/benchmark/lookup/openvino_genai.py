"""OpenVINO GenAI, which reads GGUF files, and its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from tools.benchmark.lookup.lookup_job import Q8_0, Answer, LookupJob

DRAFTED, GRAM = 10, 3  # tokens; the second is llmserve's value


def main() -> None:
    job = LookupJob.read()
    rounded = Path(job.gguf).with_suffix(Q8_0)  # made by llama.cpp
    path = str(rounded if rounded.is_file() else job.gguf)

    def answering(looks_up: bool) -> Answer:
        options = {"prompt_lookup": True} if looks_up else {}
        pipeline = openvino_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=job.threads, **options)
        config = openvino_genai.GenerationConfig(do_sample=False, ignore_eos=True)
        if looks_up:
            config.num_assistant_tokens, config.max_ngram_size = DRAFTED, GRAM

        def answer(prompt: Sequence[int], num_tokens: int) -> float:
            config.max_new_tokens = config.min_new_tokens = num_tokens
            times = pipeline.generate(openvino.Tensor(np.array([prompt], np.int64)), config).perf_metrics
            assert times.get_num_generated_tokens() == num_tokens, "the answer has ended"
            return float(times.get_generate_duration().mean - times.get_ttft().mean) / 1e3

        return answer

    job.run(answering(False), answering(True))


if __name__ == "__main__":
    main()
