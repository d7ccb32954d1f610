"""Tests layers with states on this machine's first GPU: the self-test, the law, and the time of steps.

    python -m tools.gpu_check.states FOLDER NAME REPORT [KERNELS]

NAME: one of `tools.benchmark.hybrids`. KERNELS: a file of `llmserve build --kernels-only`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmserve.builder.build import build_engine
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.cuda.runtime import CudaRuntime
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.scheduler.plan import Chunk, StepPlan
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.hybrids import HYBRIDS
from tools.benchmark.ours_cuda import build_options
from tools.gpu_check.law import measure as measure_law
from tools.gpu_check.law import num_blocks as blocks_of_the_law
from tools.gpu_check.layers import BATCHES, PROMPT_STEPS, PROMPTS, REPLAYS, SAMPLE, TOKEN, shortest


def measure(directory: EngineDirectory, open_device: Callable[[], Device]) -> dict[str, Any]:
    tested = CudaRuntime(lambda ordinal: open_device()).selftest(directory)
    assert tested is not None
    path = directory.engine_file
    runner = CudaRunner(path, open_device(), num_blocks=blocks_of_the_law(path))
    try:
        law, info = measure_law(runner), runner.info  # leaves a state in every slot
        return {
            "law": law, "selftest": str(tested), "passed": tested.passed,
            "decode": [_decode(runner, batch) for batch in BATCHES if batch <= info.max_batch_size],
            "prompts": [_prompt(runner, tokens) for tokens in PROMPTS if tokens <= info.max_num_tokens],
        }  # fmt: skip
    finally:
        runner.close()


def _decode(runner: CudaRunner, batch: int) -> dict[str, Any]:
    """Measures steps of sequences that each have one token."""
    chunks = (Chunk(s, (TOKEN,), 1, (s,), SAMPLE, states=(s, s)) for s in range(batch))
    runner.step(StepPlan(tuple(chunks)))
    return {"batch": batch, "ms": 1e3 * shortest(lambda: runner.replay(batch, REPLAYS)) / REPLAYS}


def _prompt(runner: CudaRunner, tokens: int) -> dict[str, Any]:
    blocks = range(-(-tokens // runner.info.block_size))
    plan = StepPlan((Chunk(0, (TOKEN,) * tokens, 0, blocks, SAMPLE),))
    runner.step(plan)
    seconds = shortest(lambda: [runner.step(plan) for _ in range(PROMPT_STEPS)]) / PROMPT_STEPS
    return {"tokens": tokens, "ms": 1e3 * seconds}


def main(folder: str, name: str, report: str, kernels: str = "") -> None:
    engine, options = Path(folder) / "engine", build_options("float16")
    if kernels:
        options = replace(options, given={"kernels": kernels})
    if not engine.is_dir():
        build_engine(make_checkpoint(Path(folder) / "checkpoint", HYBRIDS[name]), engine, options)
    Path(report).write_text(json.dumps(measure(EngineDirectory.open(engine), NvidiaDevice)))


if __name__ == "__main__":
    main(*sys.argv[1:])
