"""llama.cpp through llama-cpp-python, whose `LlamaPromptLookupDecoding` drafts."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from tools.benchmark.lookup.lookup_job import Q8_0, Answer, LookupJob

DRAFTED = 10  # tokens; the library's default


def quantized(source: Path, threads: int) -> Path:
    """Converts it to Q8_0, in the same folder as `source`."""
    path = source.with_suffix(Q8_0)
    if not path.is_file():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True, threads
        staged = path.with_suffix(".partial")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(staged).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not quantize {source}")
        staged.rename(path)
    return path


def main() -> None:
    job = LookupJob.read()
    path = str(quantized(Path(job.gguf), job.threads))
    num_context = max(map(len, job.prompts)) + job.num_tokens + DRAFTED + 1

    def answering(draft: LlamaPromptLookupDecoding | None) -> Answer:
        model = llama_cpp.Llama(
            path, n_ctx=num_context, n_threads=job.threads, n_threads_batch=job.threads, draft_model=draft,
            verbose=False,
        )  # fmt: skip

        def answer(prompt: Sequence[int], num_tokens: int) -> float:
            tokens = model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True)
            times = [time.perf_counter() for _ in islice(tokens, num_tokens)]
            return times[-1] - times[0]

        return answer

    job.run(answering(None), answering(LlamaPromptLookupDecoding(num_pred_tokens=DRAFTED)))


if __name__ == "__main__":
    main()
