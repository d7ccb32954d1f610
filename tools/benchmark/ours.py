"""Our CPU engine as a `Model`: planned steps, each with one call into the library, without queue and server.
`RunnerModel` works with any runner."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import llmserve
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import BuildPlan, plan_build
from llmserve.core import SamplingParams
from llmserve.engine.base import Runner
from llmserve.engine.cpu.runner import CpuRunner, read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.native import library
from llmserve.models.number_formats import AUTO, QUANTIZED
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tools.benchmark.contestants import GGUF
from tools.benchmark.job import Job
from tools.benchmark.peers.gguf_file import gguf_path

INT8_CACHE = "kv-int8"
GREEDY = SamplingParams(temperature=0.0)


def build_options(precision: str) -> BuildOptions:
    """`precision`: a dtype; or a quantization, with float16 for the rest; or "float16+kv-int8" for an int8 cache."""
    numbers, _, cache = precision.partition("+")
    options = BuildOptions(kv_cache_dtype=cache.removeprefix("kv-") or AUTO)
    return replace(options, quantization=numbers) if numbers in QUANTIZED else replace(options, dtype=numbers)


def engine_directory(job: Job) -> Path:
    return job.file(job.precision)


def source(job: Job) -> Path:
    """The input of a build: the checkpoint, or the file that llama.cpp runs."""
    return gguf_path(job) if job.precision == GGUF else job.checkpoint


def prepare(job: Job) -> None:
    """Builds the engine unless one exists that is newer than the library, which determines tactics and layouts."""
    directory = engine_directory(job)
    manifest = directory / "manifest.json"
    if not manifest.is_file() or manifest.stat().st_mtime < _library_file().stat().st_mtime:
        shutil.rmtree(directory, ignore_errors=True)
        build_engine(source(job), directory, build_options(job.precision))


def _library_file() -> Path:
    return Path(library.__file__).with_name(library.LIBRARY_NAME)


@functools.cache
def build_plan(job: Job) -> BuildPlan:
    return plan_build(source(job), build_options(job.precision), measure=lambda: 0.0)


def open_model(job: Job) -> RunnerModel:
    path = EngineDirectory.open(engine_directory(job)).engine_file
    num_blocks = num_kv_blocks(job, read_header(path).block_size)
    runner = CpuRunner.open(path, num_blocks=num_blocks, threads=job.threads)
    return RunnerModel(runner, build_plan(job), {"isa": runner.isa})


def num_kv_blocks(job: Job, block_size: int) -> int:
    """Blocks for the largest cell; each sequence may leave its last block nearly empty."""
    return max(cell.batch * (-(-cell.most_tokens // block_size) + 1) for cell in job.cells)


class RunnerModel:
    """See `Model`. The cache is one pool; sequence s of a cell has the blocks s * n to s * n + n - 1. `adapters`: each
    sequence's slot; empty: no adapters."""

    def __init__(
        self, runner: Runner, plan: BuildPlan, versions: Mapping[str, str], *, adapters: Sequence[int] = ()
    ) -> None:
        self._runner = runner
        self.weight_bytes = plan.weight_bytes_per_step
        self.kv_bytes_per_token = float(plan.kv_bytes_per_token)
        self.versions = {"llmserve": llmserve.__version__, **versions}
        self._adapters = adapters
        self._tables: list[range] = []
        self._ids: list[int] = []
        self._length = 0  # tokens in the cache, of every sequence

    def prepare(self, batch: int, max_tokens: int) -> None:
        count = -(-max_tokens // self._runner.info.block_size)
        assert batch * count <= self._runner.info.num_blocks
        self._tables = [range(s * count, (s + 1) * count) for s in range(batch)]
        self._length = 0

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        if sum(map(len, prompts)) <= self._runner.info.max_num_tokens:
            return self._advance(prompts)
        self._ids = [self._long_prompt(s, prompt) for s, prompt in enumerate(prompts)]
        self._length = len(prompts[0])
        return self._ids

    def step(self) -> list[int]:
        return self._advance([(token,) for token in self._ids])

    def release(self) -> None:
        self._tables = []

    def _long_prompt(self, s: int, prompt: Sequence[int]) -> int:
        """Computes a prompt in steps of as many tokens as the engine allows; returns its first new token."""
        most, block_size = self._runner.info.max_num_tokens, self._runner.info.block_size
        tokens: Sequence[int] = ()
        for start in range(0, len(prompt), most):
            ids = prompt[start : start + most]
            end = start + len(ids)
            sample = SampleRequest(GREEDY, stream=0, position=end) if end == len(prompt) else None
            chunk = Chunk(s, ids, start, self._tables[s][: -(-end // block_size)], sample, states=(s, s))
            tokens = self._runner.step(StepPlan((chunk,))).tokens
        [token] = tokens
        return token

    def _advance(self, new_ids: Sequence[Sequence[int]]) -> list[int]:
        """Runs one step with these tokens of each sequence, and a sample after each."""
        start, count = self._length, len(new_ids[0])
        self._length += count
        num_blocks = -(-self._length // self._runner.info.block_size)
        sample = SampleRequest(GREEDY, stream=0, position=self._length)
        chunks = [
            Chunk(
                s, ids, start, table[:num_blocks], sample, states=(s, s),
                adapter=self._adapters[s] if self._adapters else 0,
            )
            for s, (ids, table) in enumerate(zip(new_ids, self._tables, strict=True))
        ]  # fmt: skip
        self._ids = list(self._runner.step(StepPlan(tuple(chunks))).tokens)
        return self._ids
