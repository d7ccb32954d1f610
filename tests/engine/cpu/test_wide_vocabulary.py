"""Sampling from 150,000 tokens: each draw against plain numpy, and to the bit the same from every instruction set, in
any batch and on any number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.core import SamplingParams
from llmserve.engine.base import StepResult
from llmserve.engine.cpu.runner import CpuRunner, available_isas
from llmserve.evaluation.served.sampling_model import Draw, distribution, log_softmax
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.engine.cpu.networks import LIMITS, wide_table_network

VOCAB = 150_000
BATCH = 32
LIKE_A_NETWORK, FLAT, TIED, STEEP = range(4)


def make_table() -> NDArray[np.float32]:
    noise = np.random.default_rng(8).standard_normal((4, VOCAB))
    noise[LIKE_A_NETWORK] += 9 * (np.random.default_rng(9).random(VOCAB) < 1e-4)
    noise[TIED] = np.round(noise[TIED] * 2)
    noise[STEEP] *= 6
    return noise.astype(np.float32)


TABLE = make_table()
HISTORY = tuple(np.random.default_rng(1).integers(0, VOCAB, 3000).tolist()) + tuple(
    TABLE[LIKE_A_NETWORK].argsort()[-40:].tolist() * 2
)
BANNED = tuple(range(0, VOCAB, 3))
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.2),
    "hot": SamplingParams(temperature=4.0),
    "top_k": SamplingParams(top_k=50),
    "top_k of many": SamplingParams(top_k=20_000),
    "top_p": SamplingParams(top_p=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "all filters": SamplingParams(temperature=1.5, top_k=3000, top_p=0.8, min_p=0.001),
}
REQUESTS = {
    **{name: SampleRequest(params, 0, 0, log_prob=True) for name, params in PARAMS.items()},
    "penalties": SampleRequest(
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.1, top_p=0.95),
        1, 0, HISTORY, 900,
    ),
    "bias and bans": SampleRequest(SamplingParams(), 0, 0, bias=((149_999, 9.0), (1, -3.0)), banned=BANNED),
    "greedy with bans": SampleRequest(SamplingParams(temperature=0.0), 0, 0, banned=BANNED),
}  # fmt: skip
ROWS_AND_REQUESTS = [
    (row, dataclasses.replace(request, position=position, params=dataclasses.replace(request.params, seed=row)))
    for row in range(len(TABLE))
    for request in REQUESTS.values()
    for position in range(6)
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = dataclasses.replace(LIMITS, max_batch_size=BATCH, max_num_tokens=BATCH)
    return wide_table_network(TABLE).compile(tmp_path_factory.mktemp("wide") / "rank0.engine", options)


def sampled(path: Path, *, isa: str = "", threads: int = 2, batch: int = BATCH) -> StepResult:
    """A token and a log-prob for each of ROWS_AND_REQUESTS, `batch` in a step."""
    with closing(CpuRunner.open(path, num_blocks=2, threads=threads, isa=isa)) as runner:
        results = [runner.step(plan) for plan in plans(ROWS_AND_REQUESTS, batch)]
    tokens = [token for result in results for token in result.tokens]
    return StepResult(tokens, [log_prob for result in results for log_prob in result.log_probs])


def plans(wanted: Sequence[tuple[int, SampleRequest]], batch: int) -> Iterator[StepPlan]:
    for begin in range(0, len(wanted), batch):
        part = wanted[begin : begin + batch]
        yield StepPlan(tuple(Chunk(i, [row], 0, [0], request) for i, (row, request) in enumerate(part)))


@pytest.fixture(scope="module")
def found(path: Path) -> StepResult:
    return sampled(path)


def test_every_draw_is_the_one_that_numpy_makes(found: StepResult) -> None:
    for (row, request), token in zip(ROWS_AND_REQUESTS, found.tokens, strict=True):
        if request.params.is_greedy:
            assert token == distribution(TABLE[row], request).argmax()
        else:
            assert Draw.of(TABLE[row], request).allows(token), (row, request.params)


def test_log_probs(found: StepResult) -> None:
    for (row, request), token, log_prob in zip(ROWS_AND_REQUESTS, found.tokens, found.log_probs, strict=True):
        assert log_prob == pytest.approx(float(log_softmax(TABLE[row])[token]) if request.log_prob else 0.0, abs=1e-5)


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set_draws_the_same(isa: str, path: Path, found: StepResult) -> None:
    assert sampled(path, isa=isa) == found


@pytest.mark.parametrize(("threads", "batch"), [(1, 1), (2, 5), (3, BATCH)])
def test_batch_and_threads_change_nothing(threads: int, batch: int, path: Path, found: StepResult) -> None:
    assert sampled(path, threads=threads, batch=batch) == found
