"""Sampling in C++ against its definition in numpy, parameter by parameter, on logits that a table gives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.core import MAX_SEED, GenerateRequest, SamplingParams
from llmserve.engine.base import StepResult
from llmserve.engine.cpu.runner import CpuRunner, available_isas
from llmserve.engine.validation import check_request
from llmserve.evaluation.served.sampling_model import adjusted_logits, distribution, log_softmax, philox, uniform
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.engine.cpu.networks import LIMITS, table_network

VOCAB = 53
BATCH = 128
NEUTRAL, TIED, FLAT, NAN = 0, 1, 2, 3  # rows of the table with special logits


def make_table() -> NDArray[np.float32]:
    table = (np.random.default_rng(3).standard_normal((VOCAB, VOCAB)) * 2).astype(np.float32)
    table[TIED] = np.round(table[TIED])
    table[FLAT] = 0.0
    table[NAN] = np.nan
    return table


TABLE = make_table()


@pytest.fixture(scope="module", params=available_isas())
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    path: Path = tmp_path_factory.mktemp("table") / "rank0.engine"
    options = dataclasses.replace(LIMITS, max_batch_size=BATCH, max_num_tokens=BATCH)
    table_network(TABLE).compile(path, options)
    opened = CpuRunner.open(path, num_blocks=4, threads=2, isa=request.param)
    yield opened
    opened.close()


def sample(runner: CpuRunner, row: int, requests: Sequence[SampleRequest]) -> StepResult:
    """One token for each request, all from the logits TABLE[row]."""
    tokens: list[int] = []
    log_probs: list[float] = []
    for begin in range(0, len(requests), BATCH):
        chunks = [Chunk(i, [row], 0, [0], request) for i, request in enumerate(requests[begin : begin + BATCH])]
        result = runner.step(StepPlan(tuple(chunks)))
        tokens += result.tokens
        log_probs += result.log_probs
    return StepResult(tokens, log_probs)


def draws(request: SampleRequest, count: int) -> list[SampleRequest]:
    return [dataclasses.replace(request, position=position) for position in range(count)]


MASK = bytes([0xAA, 0, 0xFF, 1, 0, 0xFF, 0xFF, 0])
HISTORY = (4, 7, 7, 9, 11, 7, 4, 30, 7, 30)
REQUESTS = {
    "plain": SampleRequest(SamplingParams(), 0, 0),
    "cold": SampleRequest(SamplingParams(temperature=0.3), 0, 0),
    "hot": SampleRequest(SamplingParams(temperature=3.0), 0, 0),
    "top_k": SampleRequest(SamplingParams(top_k=5), 0, 0),
    "top_k beyond the vocabulary": SampleRequest(SamplingParams(top_k=1000), 0, 0),
    "top_p": SampleRequest(SamplingParams(top_p=0.7), 0, 0),
    "tiny top_p": SampleRequest(SamplingParams(top_p=1e-6), 0, 0),
    "min_p": SampleRequest(SamplingParams(min_p=0.1), 0, 0),
    "all filters": SampleRequest(SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05), 0, 0),
    "repetition": SampleRequest(SamplingParams(repetition_penalty=1.7), 0, 0, HISTORY, 3),
    "presence": SampleRequest(SamplingParams(presence_penalty=1.1), 0, 0, HISTORY, 3),
    "frequency": SampleRequest(SamplingParams(frequency_penalty=0.8), 0, 0, HISTORY, 3),
    "penalties": SampleRequest(
        SamplingParams(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.4), 0, 0, HISTORY, 5
    ),
    "bias": SampleRequest(SamplingParams(), 0, 0, bias=((3, 4.0), (8, -9.0))),
    "bans": SampleRequest(SamplingParams(), 0, 0, banned=tuple(range(5, 40))),
    "mask": SampleRequest(SamplingParams(), 0, 0, mask=lambda: MASK),
    "mask and filters": SampleRequest(
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.7), 0, 0, HISTORY, 3,
        bias=((3, 4.0), (8, -9.0)), banned=(1,), mask=lambda: MASK,
    ),
    "everything": SampleRequest(
        SamplingParams(temperature=1.3, top_k=25, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.2),
        0, 0, HISTORY, 2, ((3, 2.0),), (0, 1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", [10, TIED, FLAT])
@pytest.mark.parametrize("name", REQUESTS)
def test_draws_follow_the_defined_distribution(name: str, row: int, runner: CpuRunner) -> None:
    """Fixed seeds: only possible tokens, and frequencies within what chance allows (chi-squared)."""
    count = 1024
    request = dataclasses.replace(REQUESTS[name], params=dataclasses.replace(REQUESTS[name].params, seed=77))
    wanted = distribution(TABLE[row], request)
    found = Counter(sample(runner, row, draws(request, count)).tokens)
    assert set(found) <= set(np.flatnonzero(wanted).tolist())
    likely = np.flatnonzero(wanted * count >= 5)
    statistic = sum((found[i] - wanted[i] * count) ** 2 / (wanted[i] * count) for i in likely.tolist())
    assert statistic < len(likely) + 6 * np.sqrt(2 * len(likely)) + 1


def test_penalties_alter_logits_as_defined(runner: CpuRunner) -> None:
    """Greedy shows one adjusted logit at a time: a bias lifts a rival just below it, then just above."""
    request = REQUESTS["penalties"]
    wanted = adjusted_logits(TABLE[10], request)
    rival = 50
    requests = []
    for token in (4, 7, 9, 11, 30, 2):
        others = [i for i in range(VOCAB) if i not in (token, rival)]
        for margin in (-1e-4, 1e-4):
            bias = ((rival, float(wanted[token] - wanted[rival] + margin)),)
            params = dataclasses.replace(request.params, temperature=0.0)
            requests.append(dataclasses.replace(request, params=params, bias=bias, banned=others))
    assert sample(runner, 10, requests).tokens == [
        choice for token in (4, 7, 9, 11, 30, 2) for choice in (token, rival)
    ]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1, temperature=2.0)])
def test_greedy_takes_the_lowest_id_of_the_largest(params: SamplingParams, runner: CpuRunner) -> None:
    rows = [i for i in range(VOCAB) if i != NAN]
    chunks = [Chunk(i, [row], 0, [0], SampleRequest(params, 0, 0)) for i, row in enumerate(rows)]
    assert runner.step(StepPlan(tuple(chunks))).tokens == TABLE[rows].argmax(axis=1).tolist()
    assert len(np.flatnonzero(TABLE[TIED] == TABLE[TIED].max())) > 1


def test_philox_is_philox() -> None:
    """Known answers of the generator's authors."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize(
    ("seed", "position", "stream"),
    [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (MAX_SEED, 2**20, 2**31), (2**40 + 3, 5, 7)],
)
def test_a_draw_is_a_function_of_seed_stream_and_position(
    seed: int, position: int, stream: int, runner: CpuRunner
) -> None:
    """On flat logits the draw is the uniform number itself, cut into equal parts."""
    request = SampleRequest(SamplingParams(seed=seed), stream, position)
    assert sample(runner, FLAT, [request]).tokens == [int(uniform(seed, position, stream) * VOCAB)]


def test_streams_of_one_seed_differ(runner: CpuRunner) -> None:
    requests = [
        SampleRequest(SamplingParams(seed=5), stream, position) for stream in range(2) for position in range(20)
    ]
    tokens = sample(runner, FLAT, requests).tokens
    assert tokens[:20] != tokens[20:]
    assert len(set(tokens)) > 15


def test_log_probs_are_of_the_unmodified_logits(runner: CpuRunner) -> None:
    request = dataclasses.replace(REQUESTS["everything"], log_prob=True)
    for row in (10, TIED, FLAT, 20):
        result = sample(runner, row, draws(request, 16))
        np.testing.assert_allclose(result.log_probs, log_softmax(TABLE[row])[list(result.tokens)], atol=1e-6)
    assert sample(runner, 10, draws(REQUESTS["everything"], 3)).log_probs == [0.0] * 3


def test_when_everything_is_banned_bans_are_ignored(runner: CpuRunner) -> None:
    request = SampleRequest(SamplingParams(seed=1), 0, 0, banned=tuple(range(VOCAB)), log_prob=True)
    result = sample(runner, 10, [request])
    assert result.tokens == [int(TABLE[10].argmax())]
    np.testing.assert_allclose(result.log_probs[0], log_softmax(TABLE[10]).max(), atol=1e-6)


def test_logits_that_are_no_numbers_give_a_token_all_the_same(runner: CpuRunner) -> None:
    for name, request in REQUESTS.items():
        result = sample(runner, NAN, draws(dataclasses.replace(request, log_prob=True), 3))
        assert result.tokens == [0 if request.mask is None else 1] * 3, name  # the lowest that a mask allows
        assert result.log_probs == [-np.inf] * 3


def test_extreme_temperatures(runner: CpuRunner) -> None:
    cold = [SampleRequest(SamplingParams(temperature=value), 0, 3) for value in (1e-38, 1e-6, 1e-3)]
    assert sample(runner, 10, cold).tokens == [int(TABLE[10].argmax())] * 3
    hot = SampleRequest(SamplingParams(temperature=1e30), 0, 0)
    assert len(set(sample(runner, 10, draws(hot, 300)).tokens)) > 45


TOP = int(TABLE[10].argmax())
BEYOND_THE_RECORD = {
    "top_k": (SampleRequest(SamplingParams(top_k=2**40, seed=7), 0, 3), SampleRequest(SamplingParams(seed=7), 0, 3)),
    "top_p": (SampleRequest(SamplingParams(top_p=1e-300), 0, 3), TOP),
    "min_p": (SampleRequest(SamplingParams(min_p=1e-300), 0, 3), SampleRequest(SamplingParams(), 0, 3)),
    "temperature": (
        SampleRequest(SamplingParams(temperature=1e300), 0, 3), SampleRequest(SamplingParams(temperature=1e30), 0, 3),
    ),
    "little temperature": (SampleRequest(SamplingParams(temperature=1e-300), 0, 3), TOP),
    "bias": (SampleRequest(SamplingParams(), 0, 3, bias=((8, -1e300), (9, 1e300))), 9),
    "repetition": (SampleRequest(SamplingParams(repetition_penalty=1e-300), 0, 3, (TOP,), 1), TOP),
    "frequency": (SampleRequest(SamplingParams(frequency_penalty=-1e300, presence_penalty=1e300), 0, 3, (6, 6)), 6),
    "seed and position": (
        SampleRequest(SamplingParams(seed=MAX_SEED), 127, 2**32),
        int(uniform(MAX_SEED, 2**32, 127) * VOCAB),
    ),
    "an end token outside of the vocabulary": (
        SampleRequest(SamplingParams(temperature=0.0), 0, 3, banned=(-1, TOP, VOCAB, 2**40)),
        int(np.delete(TABLE[10], TOP).argmax()) + (np.delete(TABLE[10], TOP).argmax() >= TOP),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND_THE_RECORD)
def test_valid_values_that_the_record_cannot_hold(name: str, runner: CpuRunner) -> None:
    request, wanted = BEYOND_THE_RECORD[name]
    check_request(
        GenerateRequest("r", (1,), request.params, embedding_bias=tuple(request.bias)), vocab_size=VOCAB, max_seq_len=64
    )
    row = FLAT if name == "seed and position" else 10
    token = sample(runner, row, [wanted]).tokens[0] if isinstance(wanted, SampleRequest) else wanted
    assert sample(runner, row, [request]).tokens == [token]
