"""Tokens chosen on the device against the library of the CPU engine, on any logits: the same tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.core import SamplingParams
from llmserve.engine.base import StepResult
from llmserve.engine.cuda.choices import most_ids
from llmserve.engine.cuda.layout import Room, StepPart
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.native.choosers import Choosers
from llmserve.engine.native.step import FlatStep
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.engine.cpu.networks import LIMITS, wide_table_network
from tests.engine.cuda.engines import SMALL_TILES, compile_engine, open_runner
from tests.engine.cuda.fake_device import FakeGraph

VOCAB = 4500  # more blocks than are looked at first; the last one is not full
ROWS = 6
OPTIONS = dataclasses.replace(LIMITS, target="cuda", given={"gpu": "sm_90"}, max_batch_size=8, max_seq_len=4096)
TILES = replace(SMALL_TILES, columns=4096, choice=4096)
GREEDY = SamplingParams(temperature=0.0)


class GivenLogits(FakeGraph):
    """In place of the head: logits that a test has made."""

    def __init__(self, runner: CudaRunner) -> None:
        super().__init__()
        self._runner = runner
        self.logits: NDArray[np.float32] = np.empty(0, np.float32)

    def __getattribute__(self, name: str) -> object:
        if name == "launches":
            address, logits = self._runner._places[Room.LOGITS], self.logits.reshape(-1).view(np.uint8)
            self._runner.device._inside(address, len(logits))[:] = logits  # type: ignore[attr-defined]
        return super().__getattribute__(name)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CudaRunner]:
    table = np.zeros((ROWS, VOCAB), np.float32)
    path = compile_engine(wide_table_network(table), tmp_path_factory.mktemp("choosing") / "e", OPTIONS, tiles=TILES)
    opened = open_runner(path)
    yield opened
    opened.close()


def made_logits(rng: np.random.Generator, kind: str) -> NDArray[np.float32]:
    """[VOCAB]"""
    logits = (rng.standard_normal(VOCAB) * 3).astype(np.float32)
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = -0.0
        logits[::3] = 0.0
    elif kind == "broken":
        logits[rng.integers(VOCAB, size=900)] = np.nan
        logits[rng.integers(VOCAB, size=900)] = -np.inf
        logits[rng.integers(VOCAB, size=2)] = np.inf
    elif kind == "lost":
        logits[:] = np.nan
    elif kind == "certain":
        logits[:] = -np.inf
        logits[[77, 4400]] = 1.0, 1.0
    return logits


def made_request(rng: random.Random) -> SampleRequest:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 5, 50, 700]),
        top_p=rng.choice([1.0, 1.0, 0.2, 0.9, 0.9999]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.02]),
        seed=rng.getrandbits(64),
    )
    if rng.random() < 0.3:
        params = replace(params, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.3)
    some = [rng.randrange(VOCAB) for _ in range(rng.choice([3, 1100]))]
    history = [*some, *some[: len(some) // 2]] if params.has_penalties else []
    biases = tuple((token, rng.uniform(-9, 9)) for token in sorted(set(some)))
    banned = tuple(sorted({rng.randrange(VOCAB) for _ in range(rng.choice([2, 1500]))}))
    return SampleRequest(
        params, rng.randrange(3), rng.randrange(1 << 33), history, len(history) // 3,
        bias=rng.choice([(), biases]), banned=rng.choice([(), banned]),
    )  # fmt: skip


def step(runner: CudaRunner, logits: NDArray[np.float32], requests: Sequence[SampleRequest]) -> StepResult:
    graph = GivenLogits(runner)
    graph.logits = logits
    runner._graphs.update({key: graph for key in runner._graphs if key[0] is StepPart.HEAD})
    return runner.step(plan_of(requests))


def plan_of(requests: Sequence[SampleRequest]) -> StepPlan:
    return StepPlan(tuple(Chunk(i, [0], 0, [i], sample=request) for i, request in enumerate(requests)))


def of_library(logits: NDArray[np.float32], requests: Sequence[SampleRequest]) -> StepResult:
    choosers = Choosers(VOCAB, 1)
    choice = choosers.begin(plan_of(requests))
    choice.add(logits, 0)
    found = choice.result()
    choosers.close()
    return found


@pytest.mark.parametrize("kind", ["plain", "tied", "flat", "broken", "lost", "certain"])
def test_the_device_chooses_as_the_library_does(runner: CudaRunner, kind: str) -> None:
    rng, numbers = random.Random(kind), np.random.default_rng(len(kind))
    for _ in range(3):
        logits = np.stack([made_logits(numbers, kind) for _ in range(ROWS)])
        requests = [made_request(rng) for _ in range(ROWS)]
        with patch.object(Choosers, "choose", side_effect=AssertionError("the library was asked")):
            found = step(runner, logits, requests)
        assert found == of_library(logits, requests)


def test_who_wants_more_than_a_token_gets_it_from_the_library(runner: CudaRunner) -> None:
    """Beside others, in rows of the same piece."""
    logits = np.stack([made_logits(np.random.default_rng(8), "plain") for _ in range(ROWS)])
    plain = SampleRequest(SamplingParams(temperature=0.8, seed=3), 0, 7)
    mask = np.packbits(np.arange(-(-VOCAB // 32) * 32) % 3 == 0, bitorder="little").tobytes()
    requests = [
        plain,
        replace(plain, log_prob=True),
        replace(plain, num_top=3),
        replace(plain, stream=1),
        replace(plain, mask=lambda: mask),
        replace(plain, logits=True),
    ]
    asked: list[int] = []
    choose = Choosers.choose

    def watched(self: Choosers, flat: FlatStep, rows: NDArray[np.float32], begin: int) -> None:
        asked.extend(range(begin, begin + len(rows)))
        choose(self, flat, rows, begin)

    with patch.object(Choosers, "choose", watched):
        found = step(runner, logits, requests)
    wanted = of_library(logits, requests)
    assert asked == [1, 2, 4, 5]
    assert (found.tokens, found.log_probs) == (wanted.tokens, wanted.log_probs)
    assert found.scores[2] == wanted.scores[2]
    np.testing.assert_array_equal(found.logits[5], logits[5:])


def test_more_ids_than_there_is_room_for_are_the_librarys(runner: CudaRunner) -> None:
    logits = np.stack([made_logits(np.random.default_rng(9), "plain") for _ in range(2)])
    history = [random.Random(1).randrange(VOCAB) for _ in range(most_ids(runner.header))]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    requests = [SampleRequest(params, 0, 3, history, 2, banned=(int(np.argmax(row)),)) for row in logits]
    assert step(runner, logits, requests) == of_library(logits, requests)
