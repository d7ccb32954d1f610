"""Our CUDA engine as a `Model`, on this machine's first GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.builder.targets.base import Target
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.layout import read_header
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.directory.artifact import EngineDirectory
from tools.benchmark import ours
from tools.benchmark.job import Job
from tools.benchmark.ours import RunnerModel

TARGET: Target | None = None  # None: the target in the registry
OPEN_DEVICE: Callable[[], Device] = NvidiaDevice
MAX_BATCH, MAX_NUM_TOKENS = 256, 2048


def build_options(precision: str) -> BuildOptions:
    options = ours.build_options(precision)
    return replace(options, target="cuda", max_batch_size=MAX_BATCH, max_num_tokens=MAX_NUM_TOKENS)


def engine_directory(job: Job) -> Path:
    return job.file(f"cuda-{job.precision}")


def prepare(job: Job) -> None:
    """Builds the engine, unless it exists."""
    directory = engine_directory(job)
    if not (directory / "manifest.json").is_file():
        build_engine(job.checkpoint, directory, build_options(job.precision), target=TARGET)


def open_model(job: Job) -> RunnerModel:
    path = EngineDirectory.open(engine_directory(job)).engine_file
    device = OPEN_DEVICE()
    num_blocks = ours.num_kv_blocks(job, read_header(path).block_size)
    runner = CudaRunner(path, device, num_blocks=num_blocks, threads=job.threads)
    plan = plan_build(job.checkpoint, build_options(job.precision), measure=lambda: 0.0)  # for the GPU's cache size
    return RunnerModel(runner, plan, {"gpu": device.name})
