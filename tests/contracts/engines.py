"""The engines that the contract is tested on. To add one: a function that opens it, and its name in `ENGINES`.

An engine needs a vocabulary of at least 64 tokens and a `max_seq_len` of at least 64 to take part.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine

EngineFactory = Callable[[pytest.TempPathFactory], Engine]


def open_fake(_: pytest.TempPathFactory) -> Engine:
    return fake_engine(step_delay_s=0.001)  # slow enough to be interrupted


ENGINES: dict[str, EngineFactory] = {"fake": open_fake}
