"""Drafts in a network with states: a state behind a wrong draft is given up, and what was drawn is computed again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from llmserve.core import SamplingParams, Tenant
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Draftable, Speculation
from llmserve.scheduler.drafts.lookup import LookupDrafter
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import Policy, SchedulerSettings
from llmserve.scheduler.speculation import ROWS_PER_DRAFT
from llmserve.scheduler.states import StatePool
from llmserve.scheduler.step_costs import StepCosts
from tests.scheduler.harness import GREEDY, INFO, PLAIN, Bench, answer_alone

# Each state is as large as 50 blocks: so none is kept but before the end of a prompt.
STATES = replace(INFO, max_num_tokens=32, num_states=8, state_bytes=50, block_bytes=1)
LOOKUP = SchedulerSettings(speculation=Speculation.LOOKUP)
PROMPT = (1, 2, 3)
LONG = replace(GREEDY, max_tokens=40)


@pytest.fixture(autouse=True)
def _drafts_are_always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "observe", lambda costs, num_rows, seconds: None)


def drafting(monkeypatch: pytest.MonkeyPatch, num_right: Sequence[int], max_num: int = 8) -> None:
    """Drafts of which so many tokens are right, in turn."""
    turn = iter([*num_right] * 100)

    def propose(drafter: LookupDrafter, sequence: Draftable, threshold: float) -> list[int]:
        answer, _ = answer_alone(sequence.request, 0, STATES)  # type: ignore[attr-defined]
        right = answer[len(sequence.token_ids) - len(PROMPT) :]
        count = next(turn)
        return [token if place < count else (token + 1) % 7 for place, token in enumerate(right[:max_num])]

    monkeypatch.setattr(LookupDrafter, "propose", propose)


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """Of each chunk: its start, its tokens that are known, and those that are drafted."""
    assert plan is not None
    return [(chunk.start, len(chunk.token_ids) - len(chunk.drafted), len(chunk.drafted)) for chunk in plan.chunks]


def test_drafts_that_are_right_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, [8])
    bench = Bench(STATES, LOOKUP)
    bench.add(PROMPT, LONG)
    found = [rows(bench.step()) for _ in range(4)]
    assert found == [[(0, 3, 0)], [(3, 1, 8)], [(12, 1, 8)], [(21, 1, 8)]]
    bench.run()
    bench.assert_answers()


def test_what_was_drawn_before_a_wrong_draft_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, [3, 0, 8])
    bench = Bench(STATES, LOOKUP)
    [one] = bench.add(PROMPT, LONG)
    found = [rows(bench.step()) for _ in range(5)]
    # three of eight are drawn, and a fourth token; then none; then all
    assert found == [[(0, 3, 0)], [(3, 1, 8)], [(4, 4, 8)], [(8, 1, 8)], [(17, 1, 8)]]
    bench.run()
    bench.assert_answers()
    usage = bench.events[one][-1].usage
    assert usage is not None
    assert usage.completion_tokens == 40
    assert bench.scheduler.states.num_free == STATES.num_states


def test_tokens_that_are_computed_again_are_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the counts of steps, and to drafts of others."""
    drafting(monkeypatch, [3])
    bench = Bench(STATES, LOOKUP)
    bench.add(PROMPT, LONG)
    plans = [bench.step() for _ in range(4)]
    assert [chunk.is_context for plan in plans if plan for chunk in plan.chunks] == [True, False, False, False]
    assert rows(plans[-1])[0][1:] == (4, 8)


def test_tokens_that_are_computed_again_wait_for_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for one whose tenant comes first."""
    drafting(monkeypatch, [3])
    bench = Bench(replace(STATES, max_num_tokens=16, max_seq_len=256, num_blocks=800), LOOKUP)
    [one] = bench.add(PROMPT, LONG, tenant=Tenant("a"))
    for _ in range(3):
        bench.step()
    bench.add([1] * 200, tenant=Tenant("b", weight=4.0))
    for _ in range(6):
        num_before = len(bench.answers[one])
        bench.step()
        assert len(bench.answers[one]) > num_before


def test_without_a_state_to_spare_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, [8])
    bench = Bench(replace(STATES, num_states=2), replace(LOOKUP, enable_block_reuse=False))
    ids = [bench.add(PROMPT, replace(LONG, max_tokens=length))[0] for length in (10, 30)]
    bench.run()
    bench.assert_answers()
    drafted = [bench.sequences[one].num_drafted for one in ids]
    assert drafted[0] == 0
    assert drafted[1] > 0, "the first has left its state"


def test_states_are_kept_where_they_are_kept_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, [8, 5])
    cached = []
    for options in (PLAIN, LOOKUP):
        bench = Bench(replace(STATES, state_bytes=3, num_states=12), options)
        [first] = bench.add(PROMPT, LONG)
        bench.run()
        known = [*PROMPT, *bench.answers[first]]
        for length in range(6, 44, 4):  # the shorter ones first: what is found is not of their own
            [one] = bench.add([*known[:length], 0], replace(GREEDY, max_tokens=1), speculation=False)
            bench.run()
            cached.append((length, bench.sequences[one].num_cached_tokens))
        bench.assert_answers()
    assert cached[: len(cached) // 2] == cached[len(cached) // 2 :]
    assert max(tokens for _, tokens in cached) == 36


@pytest.mark.parametrize("ending", ["cancelled", "preempted"])
def test_who_leaves_with_tokens_to_compute_again_gives_all_back(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, [3])
    bench = Bench(STATES, LOOKUP)
    [one] = bench.add(PROMPT, LONG)
    for _ in range(3):
        bench.step()
    sequence = bench.sequences[one]
    assert sequence.num_again == 3
    if ending == "cancelled":
        bench.scheduler.cancel(one)
    else:
        bench.scheduler._preempt(sequence)
    assert bench.scheduler.states.num_free == STATES.num_states
    assert sequence.num_again == 0
    bench.run()
    bench.assert_answers()


def test_a_small_step_computes_again_over_several(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting(monkeypatch, [2], max_num=3)
    bench = Bench(replace(STATES, max_num_tokens=4), LOOKUP)
    ids = [bench.add(PROMPT, LONG)[0] for _ in range(3)]
    bench.run()
    bench.assert_answers()
    assert all(bench.sequences[one].num_accepted > 0 for one in ids)


def test_rows_that_are_computed_again_are_counted() -> None:
    """`ROWS_PER_DRAFT` is what a drafted token costs at most, however likely it is."""
    for n in range(1, MAX_DRAFTED + 1):
        for p in (place / 100 for place in range(101)):
            assert 1 + (n - 1) * p ** (n - 1) * (1 - p) < ROWS_PER_DRAFT
    assert StepCosts(ROWS_PER_DRAFT).threshold(4) > StepCosts().threshold(4)


def run_random_loads() -> int:
    """Drafts of all lengths, right and wrong. How many were drawn."""
    num_accepted = 0
    for seed in range(12):
        rng = random.Random(seed)
        info = replace(
            INFO, num_blocks=rng.randint(9, 20), max_num_tokens=rng.randint(4, 24), num_states=rng.randint(2, 9),
            state_bytes=rng.randint(1, 3), block_bytes=1,
        )  # fmt: skip
        bench = Bench(info, replace(LOOKUP, policy=rng.choice(list(Policy))))
        for _ in range(5):
            prompt = rng.choice([(), (1, 2, 3, 4) * 2]) + tuple(rng.choices(range(7), k=rng.randint(1, 6)))
            temperature = rng.choice([0.0, 1.0])
            bench.add(prompt, SamplingParams(max_tokens=16, temperature=temperature, seed=seed))
            if rng.random() < 0.5:
                bench.step()
        bench.run(1000)
        bench.assert_answers()
        num_accepted += bench.scheduler.speculator.num_accepted
    return num_accepted


@pytest.fixture
def _mixed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(drafter: LookupDrafter, sequence: Draftable, threshold: float) -> list[int]:
        answer, _ = answer_alone(sequence.request, sequence.index, INFO)  # type: ignore[attr-defined]
        right = answer[sequence.num_output :][:8]  # type: ignore[attr-defined]
        num_right = len(sequence.token_ids) * 7 % 10
        return [token if place < num_right else (token + 1) % 7 for place, token in enumerate(right)]

    monkeypatch.setattr(LookupDrafter, "propose", propose)


@pytest.mark.usefixtures("_mixed_drafts")
def test_random_loads_pass_without_a_fault() -> None:
    assert run_random_loads() > 100


@pytest.mark.usefixtures("_mixed_drafts")
@pytest.mark.parametrize("fault", ["kept though wrong", "leaked"])
def test_a_fault_is_found(fault: str) -> None:
    end_draft = StatePool.end_draft

    def broken(states: StatePool, sequence: object, *, keeps: bool) -> None:
        if fault == "leaked":
            sequence.drafted_state = None  # type: ignore[attr-defined]
        else:
            end_draft(states, sequence, keeps=True)  # type: ignore[arg-type]

    with patch.object(StatePool, "end_draft", broken), pytest.raises((AssertionError, IndexError)):
        run_random_loads()
