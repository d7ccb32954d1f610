"""The engines that the contract is tested on. To add one: a function that opens it, and its name in `ENGINES`.

An engine needs a vocabulary of at least 64 tokens and a `max_seq_len` of at least 64 to take part.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.open import open_engine
from tests.checkpoints import make_checkpoint

EngineFactory = Callable[[pytest.TempPathFactory], Engine]


def open_fake(_: pytest.TempPathFactory) -> Engine:
    return fake_engine(step_delay_s=0.001)  # slow enough to be interrupted


def open_cpu(folders: pytest.TempPathFactory) -> Engine:
    folder = folders.mktemp("cpu")
    make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=8)  # deep enough to be interrupted
    build_engine(folder / "checkpoint", folder / "engine", BuildOptions(dtype="float32", tokens_per_block=8))
    return open_engine(folder / "engine")


ENGINES: dict[str, EngineFactory] = {"fake": open_fake, "cpu": open_cpu}
