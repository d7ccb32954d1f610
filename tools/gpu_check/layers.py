"""Measures a few layers of a large network on this machine's first GPU, without scheduler, to estimate the whole.

    python -m tools.gpu_check.layers FOLDER PRECISION REPORT [KERNELS]

Steps of decoding sequences are replayed as graphs, so their times include no Python; prompts are whole steps. The
layers' times are multiplied and the head's is added: `whole_ms` is extrapolated, not measured. `kernels`: a file of
`llmserve build --kernels-only`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmserve.builder.build import build_engine
from llmserve.core import SamplingParams
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.cuda.tuning import time_tactics
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.progress import SilentProgress
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.ours_cuda import build_options
from tools.benchmark.shapes import SHAPES
from tools.gpu_check.law import measure as measure_law
from tools.gpu_check.law import num_blocks as blocks_of_the_law
from tools.gpu_check.speed_of_networks import LAYERS, WHOLE

CONTEXTS = (32, 2000)  # length of the sequence before the decoded token
BATCHES = (1, 4, 8, 16, 64, 256)
PROMPTS = (128, 512, 1100, 2048)
TOKEN = 5
REPLAYS, PROMPT_STEPS, TRIALS = 20, 3, 3
SAMPLE = SampleRequest(SamplingParams(temperature=0.0), stream=0, position=2)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of an opened engine, and the whole network's number of layers."""

    runner: CudaRunner
    of_the_whole: int

    def decode(self, batch: int, context: int) -> dict[str, Any]:
        """body_bytes: bytes of the layers' weights and caches, which a step reads."""
        runner, blocks = self.runner, self._blocks(context + 1)
        runner.step(StepPlan(tuple(
            Chunk(s, (TOKEN,), context, range(blocks * s, blocks * (s + 1)), SAMPLE) for s in range(batch)
        )))  # fmt: skip
        body = shortest(lambda: runner.replay(batch, REPLAYS, with_head=False)) / REPLAYS
        both = shortest(lambda: runner.replay(batch, REPLAYS)) / REPLAYS
        header, times = runner.header, self.of_the_whole / runner.header.num_layers
        cached = batch * context * header.kv_bytes_per_block // header.block_size
        return {
            "batch": batch, "context": context, "body_ms": 1e3 * body, "head_ms": 1e3 * (both - body),
            "whole_ms": 1e3 * (body * times + both - body), "body_bytes": self._weight_bytes() + cached,
        }  # fmt: skip

    def prompt(self, tokens: int) -> dict[str, Any]:
        plan = StepPlan((Chunk(0, (TOKEN,) * tokens, 0, range(self._blocks(tokens)), SAMPLE),))
        self.runner.step(plan)
        seconds = shortest(lambda: [self.runner.step(plan) for _ in range(PROMPT_STEPS)]) / PROMPT_STEPS
        return {"tokens": tokens, "ms": 1e3 * seconds}

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.runner.header.block_size)

    def _weight_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.runner.header.tensors if ".layers." in f".{tensor.name}")


def shortest(run: Callable[[], object]) -> float:
    found = []
    for _ in range(TRIALS):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def measure(directory: EngineDirectory, of_the_whole: int, open_device: Callable[[], Device]) -> dict[str, Any]:
    path = directory.engine_file
    blocks = max((max(CONTEXTS) // 32 + 1) * max(BATCHES), blocks_of_the_law(path))
    began = time.perf_counter()
    runner = CudaRunner(path, open_device(), num_blocks=blocks)
    opened = time.perf_counter() - began
    try:
        layers, header = Layers(runner, of_the_whole), runner.header
        batches = [batch for batch in BATCHES if batch <= header.max_batch_size]
        contexts = [context for context in CONTEXTS if context < header.max_seq_len]
        return {
            "opened_s": opened, "layers": header.num_layers, "of_the_whole": of_the_whole,
            "law": measure_law(runner),
            "decode": [layers.decode(batch, context) for context in contexts for batch in batches],
            "prompts": [layers.prompt(tokens) for tokens in PROMPTS if tokens <= header.max_num_tokens],
            "tactics": time_tactics(runner, SilentProgress()).microseconds,
        }  # fmt: skip
    finally:
        runner.close()


def main(folder: str, precision: str, report: str, kernels: str = "") -> None:
    engine, options = Path(folder) / precision, build_options(precision)
    if kernels:
        options = replace(options, given={"kernels": kernels})
    if not engine.is_dir():
        build_engine(make_checkpoint(Path(folder) / "checkpoint", SHAPES[LAYERS]), engine, options)
    found = measure(EngineDirectory.open(engine), SHAPES[WHOLE].layers, NvidiaDevice)
    found["layer_products"] = SHAPES[WHOLE].layer_products
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
