"""The `repeat` backend: one response per element, released before they are all sent."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from llmserve.serving.types import InferRequest, Tensor
from tests.serving.models import collect, request, serving, tensors, values, write_model

TENSORS = (
    tensors("input", IN="INT32 [ -1 ]", DELAY="UINT32 [ -1 ]", WAIT="UINT32 [ 1 ]")
    + "\n"
    + tensors("output", OUT="INT32 [ 1 ]", IDX="UINT32 [ 1 ]")
)
CONFIG = f'backend: "repeat" {TENSORS} model_transaction_policy {{ decoupled: true }}'


def ask(*values_in: int, delay_ms: int = 0, wait_ms: int = 0, num_delays: int | None = None) -> InferRequest:
    count = len(values_in) if num_delays is None else num_delays
    return request(
        "repeat",
        Tensor("IN", "INT32", np.array(values_in, np.int32)),
        Tensor("DELAY", "UINT32", np.full(count, delay_ms, np.uint32)),
        Tensor("WAIT", "UINT32", np.array([wait_ms], np.uint32)),
    )


async def test_one_response_per_element_then_the_end(tmp_path: Path) -> None:
    write_model(tmp_path, "repeat", CONFIG)
    async with serving(tmp_path) as core:
        responses = await collect(core, ask(4, 2, 0))
        assert [(values(r, "OUT"), values(r, "IDX")) for r in responses[:-1]] == [([4], [0]), ([2], [1]), ([0], [2])]
        assert (responses[-1].final, responses[-1].outputs) == (True, ())
        assert len(await collect(core, ask())) == 1


async def test_the_instance_is_free_after_wait(tmp_path: Path) -> None:
    write_model(tmp_path, "repeat", CONFIG)
    async with serving(tmp_path) as core:
        ended: list[float] = []

        async def answered(asked: InferRequest) -> None:
            ended.extend(values((await collect(core, asked))[0], "OUT"))

        await asyncio.gather(answered(ask(1, delay_ms=500)), answered(ask(2)))
        assert ended == [2, 1]
        start = time.monotonic()
        await asyncio.gather(*(collect(core, ask(1, wait_ms=100)) for _ in range(3)))
        assert time.monotonic() - start > 0.2


async def test_shapes_that_differ_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "repeat", CONFIG)
    async with serving(tmp_path) as core:
        (response,) = await collect(core, ask(1, 2, num_delays=1))
        assert "expected IN and DELAY shape to match" in str(response.error)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (CONFIG + " max_batch_size: 2", "max_batch_size == 0"),
        (CONFIG.replace("true", "false"), "decoupled"),
        (CONFIG.replace("TYPE_INT32", "TYPE_FP32"), "its inputs must be"),
    ],
)
async def test_configs_that_do_not_fit(tmp_path: Path, config: str, problem: str) -> None:
    write_model(tmp_path, "repeat", config)
    async with serving(tmp_path) as core:
        (status,) = core.repository_index()
        assert problem in status.reason
