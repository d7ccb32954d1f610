"""Speculation changes no token, log-prob or finish reason, however an answer is drawn and whoever is beside it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import FinishReason, GenerateRequest, SamplingParams, TopTokens
from llmserve.engine.base import Engine, EngineStats
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.drafting import CAUTION, GRAM, INDEXED_AT_ONCE, LookupDrafter, Speculation, StepCosts
from llmserve.scheduler.settings import SchedulerSettings
from tests.checkpoints import make_checkpoint

PROMPT = (5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "nearly greedy": SamplingParams(max_tokens=40, temperature=0.1, seed=1),
    "drawn": SamplingParams(max_tokens=40, temperature=0.8, top_k=20, top_p=0.9, seed=2),
    "penalties": SamplingParams(max_tokens=40, temperature=0.1, repetition_penalty=1.1, frequency_penalty=0.2, seed=3),
    "min tokens": replace(GREEDY, min_tokens=20),
}
FEW = tuple((token, 50.0) for token in (5, 6, 7))  # answers of three tokens repeat themselves
Answer = tuple[Sequence[int], Sequence[float], Sequence[TopTokens], FinishReason | None]


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(str(request.param))
    make_checkpoint(folder / "checkpoint", "llama")
    options = BuildOptions(dtype="float32", tokens_per_block=8, max_num_tokens=64, max_batch_size=16)
    if request.param == "int8":
        options = replace(options, dtype="float16", quantization="int8")
    build_engine(folder / "checkpoint", folder / "engine", options)
    return folder / "engine"


async def answer(engine: Engine, request: GenerateRequest) -> Answer:
    async with aclosing(engine.submit(request)) as events:
        told = [event async for event in events]
    tokens = [token for event in told for token in event.token_ids]
    log_probs = [log_prob for event in told for log_prob in event.log_probs]
    return tokens, log_probs, [top for event in told for top in event.top], told[-1].finish_reason


def answers(folder: Path, speculation: Speculation) -> tuple[dict[str, Answer], EngineStats]:
    requests = {
        name: GenerateRequest(
            name, PROMPT[: -2 - number] + PROMPT[:GRAM], sampling, end_id=2, stop_ids=((5, 6, 7, 5, 5, 7),),
            embedding_bias=FEW, return_log_probs=True,
            num_top_log_probs=2,
        )
        for number, (name, sampling) in enumerate(SAMPLINGS.items())
    }  # fmt: skip
    engine = open_engine(folder, EngineSettings(scheduler=SchedulerSettings(speculation=speculation)))

    async def asked() -> dict[str, Answer]:
        alone = {f"{name} alone": await answer(engine, request) for name, request in requests.items()}
        together = await asyncio.gather(*(answer(engine, request) for request in requests.values()))
        return alone | dict(zip(requests, together, strict=True))

    try:
        return asyncio.run(asked()), engine.stats()
    finally:
        engine.close()


def test_answers_are_those_without_it_in_fewer_steps(engine_dir: Path) -> None:
    plain, without = answers(engine_dir, Speculation.OFF)
    found, stats = answers(engine_dir, Speculation.LOOKUP)
    assert found == plain
    assert stats.total_gen_tokens == without.total_gen_tokens
    assert (without.total_drafted_tokens, without.total_accepted_tokens) == (0, 0)
    assert stats.total_drafted_tokens is not None
    assert 0 < (stats.total_accepted_tokens or 0) <= stats.total_drafted_tokens
    assert stats.iteration < without.iteration


def drafted(tokens: Sequence[int], limit: int = 8, threshold: float = 0.03) -> list[int]:
    drafter, token_ids = LookupDrafter(), array("i", tokens)
    place = drafter.match(token_ids)
    return [] if place is None else list(drafter.draft(token_ids, place, limit, threshold))


def test_what_followed_last_time_is_drafted() -> None:
    assert drafted([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 8, 1, 2, 3], limit=4) == [6, 7, 8, 1]  # the last time, not the first
    assert drafted([1, 2, 3, 1, 2, 3], limit=5) == [1, 2, 3, 1, 2]  # it goes on repeating itself
    assert drafted([1, 2, 3, 4, 2, 3]) == []
    assert drafted([1, 2]) == []
    assert drafted([1, 2, 3, 1, 2, 3], limit=0) == []


def test_a_drafter_that_is_wrong_drafts_less_and_tries_again() -> None:
    drafter, tokens = LookupDrafter(), array("i", [1, 2, 3, 4, 1, 2, 3])
    lengths = []
    for _ in range(6):
        lengths.append(len(drafter.draft(tokens, 3, 15, 0.03)))
        if lengths[-1]:
            drafter.learn(lengths[-1], 0)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0]
    drafter.learn(15, 15)
    assert len(drafter.draft(tokens, 3, 15, 0.03)) > lengths[0]


def test_rows_that_cost_more_have_to_be_likelier() -> None:
    costs = StepCosts()
    assert costs.threshold(1) < costs.threshold(32)
    for _ in range(50):
        for num_rows in (1, 4, 16, 200):
            costs.observe(num_rows, 1.0 + 0.5 * num_rows)  # long steps are no interruptions
    cost = CAUTION * 0.5
    assert costs.threshold(1) == pytest.approx(cost / (1 + cost))
    costs.observe(1, 100.0)  # the machine was busy
    assert costs.threshold(1) == pytest.approx(cost / (1 + cost), abs=0.1)


def test_what_rows_cost_is_not_forgotten_where_all_steps_are_alike() -> None:
    costs = StepCosts()
    for num_rows in (1, 8, 16) * 20:
        costs.observe(num_rows, 1.0 + 0.5 * num_rows)
    measured = costs.threshold(16)
    for _ in range(200):
        costs.observe(16, 9.0)
    assert costs.threshold(16) == pytest.approx(measured, abs=0.1)
    for _ in range(4000):
        costs.observe(16, 9.0)
    assert costs.threshold(16) < 0.5  # and tried again in the end


def test_a_long_prompt_is_read_over_several_steps() -> None:
    tokens = array("i", [*range(3 * INDEXED_AT_ONCE), 0, 1, 2])
    drafter = LookupDrafter()
    drafter.match(tokens)
    assert drafter._num_indexed == INDEXED_AT_ONCE + GRAM
    assert drafter.match(tokens) == 3
