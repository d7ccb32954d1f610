"""The engines that the contract is tested on. To add one: a function that opens it, and its name in `ENGINES`.

An engine needs a vocabulary of at least 64 tokens and a `max_seq_len` of at least 64 to take part. With
CONTRACT_ENGINES=installed (`make check-gpu`) it is this machine's TensorRT-LLM alone, with CONTRACT_ENGINES=cuda
(`make check-cuda`) our own on its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.base import Engine
from llmserve.engine.budgets import TokenBudgets
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.fake import FAKE_RUNNER_INFO, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.open import open_engine
from llmserve.engine.remote.process import ProcessEngine
from llmserve.engine.replicas import ReplicatedEngine
from llmserve.engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.contracts.engine_process import COMMAND as PROCESS
from tests.contracts.engine_process import FAKE
from tests.engine.fake.pipelined import PipelinedFakeRunner
from tests.fakes.gpu_machine import gpu_machine
from tools.gpu_check.checks import CONTRACT_KERNELS, CONTRACT_NETWORK

MAX_KV_TOKENS = 1 << 15  # several engines are open at once
EngineFactory = Callable[[pytest.TempPathFactory], Engine]


def open_fake(_: pytest.TempPathFactory) -> Engine:
    return fake_engine(step_delay_s=0.001)  # slow enough to be interrupted


def open_pipelined(_: pytest.TempPathFactory) -> Engine:
    """Begins a step before the last one's tokens are known."""
    with closing(fake_engine()) as plain:
        return InflightEngine(PipelinedFakeRunner(FAKE_RUNNER_INFO, step_delay_s=0.001), plain.info)


def open_cpu(folders: pytest.TempPathFactory) -> Engine:
    folder = folders.mktemp("cpu")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=8)  # deep enough to be interrupted
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions(dtype="float32", tokens_per_block=8))
    return open_engine(folder / "engine")


def open_replicas(folders: pytest.TempPathFactory) -> Engine:
    return ReplicatedEngine({name: open_fake(folders) for name in ("GPU 0", "GPU 1")}, TokenBudgets())


def open_cuda(folders: pytest.TempPathFactory) -> Engine:
    """The executor with its graphs and buffers; kernels are interpreted, so it is slow by itself."""
    # what makes an interpreter of Triton is not for a machine whose GPU is asked
    from llmserve.builder.targets.cuda.target import CudaTarget
    from llmserve.engine.cuda.runtime import CudaRuntime
    from tests.engine.cuda.engines import WIDE_TILES
    from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice

    folder = folders.mktemp("cuda")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=1)
    options = BuildOptions(
        target="cuda", given={"gpu": "sm_90"}, dtype="float32", tokens_per_block=8, max_seq_len=64, max_num_tokens=64
    )
    build_engine(folder / "checkpoint", folder / "engine", options, target=CudaTarget(FakeCompiler(), WIDE_TILES))
    runtime = CudaRuntime(lambda ordinal: FakeDevice(ordinal=ordinal))
    return runtime.open(EngineDirectory.open(folder / "engine"), EngineSettings())


def open_process(folders: pytest.TempPathFactory) -> Engine:
    """The CPU engine in a process of its own. Words take longer to get there, so its answers are longer."""
    folder = folders.mktemp("process")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=40, max_position_embeddings=2048)
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions(dtype="float32", tokens_per_block=8))
    return ProcessEngine(PROCESS, folder / "engine", folder / "engine", EngineSettings())


def open_fake_process(folders: pytest.TempPathFactory) -> Engine:
    nowhere = folders.mktemp("nowhere")
    return ProcessEngine((*PROCESS, FAKE), nowhere, nowhere, EngineSettings())


def open_gpu(release: str, folders: pytest.TempPathFactory) -> Engine:
    """TensorRT-LLM's own batcher, faked, around the CPU engine."""
    folder = folders.mktemp("gpu")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=8)
    common = {"dtype": "float32", "tokens_per_block": 8, "target": "tensorrt_llm"}
    options = BuildOptions.from_flat({**common, "tp_size": 2 if release == "1.2" else 1, "max_beam_width": 2})
    with gpu_machine(release):
        build_engine(folder / "checkpoint", folder / "engine", options)
        return open_engine(folder / "engine")


def open_here(target: str, folders: pytest.TempPathFactory) -> Engine:
    """On this machine's GPU."""
    folder = folders.mktemp(target)
    make_checkpoint(folder / "checkpoint", "llama", **CONTRACT_NETWORK)
    kernels = os.environ.get(CONTRACT_KERNELS)
    options = BuildOptions(target=target, given={"kernels": kernels} if kernels else {})
    build_engine(folder / "checkpoint", folder / "engine", options)
    return open_engine(folder / "engine", EngineSettings(max_kv_tokens=MAX_KV_TOKENS))


FAKED: dict[str, EngineFactory] = {
    "fake": open_fake,
    "pipelined": open_pipelined,
    "cpu": open_cpu,
    "cuda": open_cuda,
    "process": open_process,
    "process-fake": open_fake_process,
    "replicas": open_replicas,
    "tensorrt_llm-1.2": partial(open_gpu, "1.2"),
    "tensorrt_llm-1.3": partial(open_gpu, "1.3"),
}
INTERPRETED = ("cuda",)  # each step takes a tenth of a second; test_interpreted_engine.py has them
INSTALLED = "tensorrt_llm"
HERE: dict[str, dict[str, EngineFactory]] = {
    "installed": {INSTALLED: partial(open_here, INSTALLED)},
    "cuda": {"nvidia": partial(open_here, "cuda")},
}
ENGINES = HERE.get(os.environ.get("CONTRACT_ENGINES", ""), FAKED)
