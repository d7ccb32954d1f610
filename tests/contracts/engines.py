"""The engines that the contract is tested on. To add one: a function that opens it, and its name in `ENGINES`.

An engine needs a vocabulary of at least 64 tokens and a `max_seq_len` of at least 64 to take part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.tensorrt_llm_options import TensorrtLlmOptions
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.open import open_engine
from tests.checkpoints import make_checkpoint
from tests.fakes.gpu_machine import gpu_machine

EngineFactory = Callable[[pytest.TempPathFactory], Engine]


def open_fake(_: pytest.TempPathFactory) -> Engine:
    return fake_engine(step_delay_s=0.001)  # slow enough to be interrupted


def open_cpu(folders: pytest.TempPathFactory) -> Engine:
    folder = folders.mktemp("cpu")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=8)  # deep enough to be interrupted
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions(dtype="float32", tokens_per_block=8))
    return open_engine(folder / "engine")


def open_gpu(release: str, folders: pytest.TempPathFactory) -> Engine:
    """TensorRT-LLM's own batcher, faked, around the CPU engine."""
    folder = folders.mktemp("gpu")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=8)
    library = TensorrtLlmOptions(tp_size=2 if release == "1.2" else 1, max_beam_width=2)
    options = BuildOptions(dtype="float32", tokens_per_block=8, target="tensorrt_llm", tensorrt_llm=library)
    with gpu_machine(release):
        build_engine(folder / "checkpoint", folder / "engine", options)
        return open_engine(folder / "engine")


ENGINES: dict[str, EngineFactory] = {
    "fake": open_fake,
    "cpu": open_cpu,
    "tensorrt_llm-1.2": partial(open_gpu, "1.2"),
    "tensorrt_llm-1.3": partial(open_gpu, "1.3"),
}
