"""Sequences all of whose tokens must be in one step: what is pooled needs no more than that step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from llmserve.core import FinishReason, SamplingParams, Tenant
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.scheduler.plan import ChunkScores, StepPlan
from llmserve.scheduler.settings import SchedulerSettings
from tests.scheduler.harness import INFO, PLAIN, Bench

WHOLE = replace(INFO, needs_whole=True, max_seq_len=16, output_width=1)
NO_REUSE = replace(PLAIN, enable_block_reuse=False)
ONE = SamplingParams(max_tokens=1)


class SumRunner:
    """The row of a text is the sum of its tokens."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info

    def step(self, plan: StepPlan) -> StepResult:
        sums = [np.array([[sum(chunk.token_ids)]], np.float32) for chunk in plan.chunks]
        return StepResult([], [], {index: ChunkScores(logits=row) for index, row in enumerate(sums)})

    def close(self) -> None:
        pass


def bench(settings: SchedulerSettings = NO_REUSE, info: RunnerInfo = WHOLE) -> Bench:
    return Bench(info, settings, runner=SumRunner(info))


def lengths(plan: StepPlan | None) -> Sequence[int]:
    assert plan is not None
    assert all(chunk.start == 0 and chunk.pooled and chunk.sample is None for chunk in plan.chunks)
    return [len(chunk.token_ids) for chunk in plan.chunks]


def test_a_text_waits_until_a_step_has_room_for_all_of_it() -> None:
    made = bench()
    texts = [[3] * 10, [2] * 10, [1] * 4, [5] * 16, [4]]
    ids = [made.add(text, ONE, pooled=True)[0] for text in texts]
    assert [lengths(made.step()) for _ in range(4)] == [[10], [10, 4], [16], [1]]
    assert not made.scheduler.has_work
    for text, number in zip(texts, ids, strict=True):
        (event,) = made.events[number]
        assert (event.finish_reason, event.token_ids) == (FinishReason.LENGTH, ())
        assert event.logits[0].tolist() == [sum(text)]


@pytest.mark.parametrize("seed", range(20))
def test_tenants_that_compete_all_get_their_steps(seed: int) -> None:
    chance, made = random.Random(seed), bench()
    tenants = [Tenant("one", 1.0), Tenant("two", 3.0), Tenant("three", 0.5)]
    wanted = {}
    for _ in range(60):
        for _ in range(chance.randint(0, 3)):
            text = [chance.randint(0, 6) for _ in range(chance.randint(1, 16))]
            priority = chance.randint(-1, 1)
            (number,) = made.add(text, ONE, pooled=True, tenant=chance.choice(tenants), priority=priority)
            wanted[number] = sum(text)
        if made.scheduler.has_work:
            lengths(made.step())
    made.run()
    assert {number: event.logits[0].tolist() for number, (event,) in made.events.items()} == {
        number: [total] for number, total in wanted.items()
    }


def test_a_decoder_that_pools_takes_its_prompt_in_parts() -> None:
    made = bench(PLAIN, replace(WHOLE, needs_whole=False, max_seq_len=64))
    made.add([1] * 40, ONE, pooled=True)
    plans = [made.step() for _ in range(3)]
    assert [[(len(chunk.token_ids), chunk.pooled) for chunk in plan.chunks] for plan in plans if plan] == [
        [(16, False)], [(16, False)], [(8, True)]
    ]  # fmt: skip
    assert not made.scheduler.has_work
