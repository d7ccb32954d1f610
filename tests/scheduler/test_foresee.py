"""Plans made before the last one's tokens are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmserve.core import FinishReason, SamplingParams, Tenant
from llmserve.scheduler.plan import UNSEEN
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.scheduler.harness import GREEDY, INFO, Bench


def opened(**limits: Any) -> Bench:
    return Bench(replace(INFO, **limits), foresees=True)


def num_ahead(bench: Bench) -> int:
    assert bench.pipeline is not None
    return bench.pipeline.num_ahead


def test_every_step_but_the_first_is_begun_before_the_last_ones_tokens_are_known() -> None:
    bench = opened()
    for prompt in ([1, 2, 3], [4, 5], [6] * 14):
        bench.add(prompt)
    bench.run()
    bench.assert_answers()
    assert bench.num_steps == GREEDY.max_tokens + 1  # a step takes eleven of the third prompt's tokens
    assert num_ahead(bench) == bench.num_steps - 1


def test_who_has_all_tokens_is_not_planned_again() -> None:
    """Nothing is computed for a sequence behind its last token."""
    bench = opened()
    bench.add([1, 2], replace(GREEDY, max_tokens=1))
    bench.add([1, 2], replace(GREEDY, max_tokens=3))
    plans = []
    while bench.scheduler.has_work:
        plans.append(bench.step())
    assert [len(plan.chunks) for plan in plans if plan] == [2, 1, 1]
    assert [chunk.token_ids[-1] for plan in plans[1:] if plan for chunk in plan.chunks] == [UNSEEN, UNSEEN]


def test_of_who_ends_by_a_word_one_token_more_is_computed_and_nobody_hears_of_it() -> None:
    bench = opened()
    (alone,) = bench.add([1, 2, 3], replace(GREEDY, max_tokens=6))
    bench.run()
    third = bench.answers[alone][2]
    (ended,) = bench.add([1, 2, 3], replace(GREEDY, max_tokens=6), end_id=third)
    bench.run()
    first_end = bench.answers[alone].index(third)
    assert bench.answers[ended] == bench.answers[alone][:first_end]
    assert bench.reasons[ended] is FinishReason.END_ID
    bench.assert_answers()


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        ({"repetition_penalty": 1.2}, {}),
        ({"presence_penalty": 0.1}, {}),
        ({"frequency_penalty": 0.1}, {}),
        ({}, {"bad_ids": ((1, 2),)}),
        ({}, {"return_prompt_log_probs": True}),
    ],
)
def test_a_step_that_depends_on_the_last_ones_tokens_waits_for_them(
    sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Penalties and bad words look at the last token, and a prompt's scores come before the first."""
    bench = opened()
    bench.add([1, 2, 3], replace(GREEDY, max_tokens=4, **sampling), **fields)
    plan = bench.step()
    assert plan is not None
    assert plan.chunks[0].sample is not None
    assert num_ahead(bench) == 0
    bench.run()
    bench.assert_answers()


def test_nobody_gives_way_before_tokens_are_known() -> None:
    """With too few blocks for all, a step waits for the tokens before it: then somebody may have ended."""
    settings = SchedulerSettings(policy=Policy.MAX_UTILIZATION, enable_block_reuse=False)
    bench = Bench(replace(INFO, num_blocks=6), settings, foresees=True)
    for prompt in ([1] * 7, [2] * 7):
        bench.add(prompt, replace(GREEDY, max_tokens=12))
    bench.run()
    bench.assert_answers()
    assert bench.num_preemptions > 0
    assert 0 < num_ahead(bench) < bench.num_steps - 1


def test_who_leaves_while_a_step_is_under_way_leaves_no_trace() -> None:
    bench = opened()
    kept, gone, late = (bench.add(prompt)[0] for prompt in ([1, 2, 3], [1, 2, 4], [5]))
    bench.step()
    bench.scheduler.cancel(gone)
    bench.check()
    bench.run()
    assert set(bench.reasons) == {kept, late}
    bench.assert_answers()


def test_a_deadline_tells_only_what_was_seen() -> None:
    bench = opened()
    (timed,) = bench.add([1, 2, 3], deadline=2.5)
    bench.run()
    assert bench.reasons[timed] is FinishReason.TIMED_OUT
    assert UNSEEN not in bench.answers[timed]
    assert len(bench.answers[timed]) == 2
    bench.assert_answers()


def test_while_tenants_compete_for_places_every_step_waits_for_the_last_one() -> None:
    """Who gives way to whom follows from what has ended."""
    bench = opened(max_batch_size=1)
    for name in ("a", "b"):
        for _ in range(2):
            bench.add([1, 2], tenant=Tenant(name))
    bench.step()
    assert num_ahead(bench) == 0
    bench.run()
    bench.assert_answers()


def test_followers_share_a_prompt_that_is_just_being_computed() -> None:
    """Blocks are shared as soon as the step that fills them has begun: what reads them comes later."""
    bench = opened(max_num_tokens=8)
    bench.add([1, 2, 3, 4, 5, 6, 7, 0], SamplingParams(max_tokens=3, seed=1), num_sequences=3)
    bench.run()
    bench.assert_answers()
    assert bench.scheduler.pool.num_reused > 0
