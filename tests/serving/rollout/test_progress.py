"""What the rules make of what is seen: no loop, no clock."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmserve.serving.config.rollout_rules import RolloutRules, make_rules
from llmserve.serving.rollout.progress import Decision, Progress, Verdict

QUICK: dict[str, Any] = {"shadow": 0.5, "canary": [0.1, 0.5], "requests": 10, "seconds": 0}


def progress(**given: Any) -> Progress:
    return Progress(make_rules({**QUICK, **given}), now=0.0)


def copies(of: Progress, number: int, *, equal: bool | None = True, error: str = "") -> None:
    for _ in range(number):
        of.candidate_ended(of.shadow, error)
        if equal is not None and not error:
            of.compared(equal=equal)


def canaries(of: Progress, number: int, error: str = "") -> None:
    for _ in range(number):
        of.candidate_ended(of.canary, error)


def verdict(decision: Decision | None) -> Verdict | None:
    return None if decision is None else decision.verdict


def test_a_good_candidate_goes_from_copies_to_all() -> None:
    run = progress(seconds=5)
    assert run.canary_share == 0.0
    copies(run, 9)
    assert run.decide(9.0) is None
    assert run.waits_for(9.0) == "1 more requests of the candidate"
    copies(run, 1)
    assert run.decide(4.0) is None  # too early
    assert verdict(run.decide(5.0)) is Verdict.NEXT_STEP
    assert run.canary_share == 0.1
    copies(run, 50)  # those that go on beside the canary's do not count for its step
    assert run.decide(20.0) is None
    canaries(run, 10)
    assert verdict(run.decide(20.0)) is Verdict.NEXT_STEP
    assert run.canary_share == 0.5
    canaries(run, 10)
    assert run.decide(24.0) is None
    assert verdict(run.decide(25.0)) is Verdict.PROMOTE


def test_by_hand_it_waits() -> None:
    run = progress(canary=[], promote="by_hand")
    copies(run, 10)
    assert verdict(run.decide(1.0)) is Verdict.WAIT
    assert run.waits_for(1.0) == "a manual promotion"
    copies(run, 10)
    assert run.decide(2.0) is None
    copies(run, 10, error="boom")
    assert verdict(run.decide(3.0)) is Verdict.ROLL_BACK  # also while it waits


def test_errors_roll_it_back_at_once() -> None:
    run = progress()
    canaries(run, 3, "the kernel is broken")
    decision = run.decide(0.0)
    assert decision is not None
    assert decision.verdict is Verdict.ROLL_BACK
    assert decision.reason == (
        "3 of 3 requests failed, too many for a rate of 1.00%; the last one: the kernel is broken"
    )


def test_other_answers_roll_it_back() -> None:
    run = progress()
    copies(run, 5, equal=False)
    decision = run.decide(0.0)
    assert decision is not None
    assert decision.verdict is Verdict.ROLL_BACK
    assert "5 of 5 answers differ, too many for an agreement of 90.00%" in decision.reason


def test_some_other_answers_hold_a_step_and_then_are_too_many() -> None:
    run = progress(min_agreement=0.9)
    for number in range(1, 100):
        copies(run, 1, equal=number % 8 != 1)
        assert run.decide(float(number)) is None
    assert "below an agreement of 90.00%" in run.waits_for(100.0)
    copies(run, 1)
    decision = run.decide(100.0)
    assert decision is not None
    assert decision.verdict is Verdict.ROLL_BACK
    assert "after 100 requests in this step, still 13 of 100 answers differ" in decision.reason


def test_answers_that_need_not_be_equal_are_no_evidence() -> None:
    run = progress()
    copies(run, 500, equal=None)
    assert run.decide(1000.0) is None
    copies(run, 10)
    assert verdict(run.decide(1000.0)) is Verdict.NEXT_STEP
    free = progress(min_agreement=None)
    copies(free, 10, equal=None)
    assert verdict(free.decide(0.0)) is Verdict.NEXT_STEP


def test_a_step_says_that_it_waits_for_answers_that_can_be_compared() -> None:
    run = progress()
    copies(run, 12, equal=None)
    copies(run, 3)
    assert run.decide(1.0) is None
    assert run.waits_for(1.0) == "7 more answers that can be compared"


def test_slowness_rolls_it_back_and_speed_does_not() -> None:
    for factor, slow in ((3.0, True), (0.3, False), (1.0, False)):
        run = progress(max_latency_ratio=2.0)
        for number in range(40):
            run.latencies["stable"].add(1.0 + number / 100, 2.0 + number / 100)
            run.candidate_timed(factor * (1.0 + number / 100), 2.0)
        decision = run.decide(0.0)
        assert (decision is not None) == slow
        if decision is not None:
            assert "the first response takes 3.00 times as long, significantly above 2" in decision.reason


def test_slowness_that_may_be_chance_holds_a_step() -> None:
    run = progress(max_latency_ratio=2.0)
    for number in range(9):
        run.latencies["stable"].add(1.0, 1.0 + number / 10)
        run.candidate_timed(2.5, 1.0)
    copies(run, 10)
    assert run.decide(0.0) is None
    assert "the first response takes 2.50 times as long, above 2" in run.waits_for(0.0)
    for _ in range(30):
        run.candidate_timed(1.0, 1.0)
        run.latencies["stable"].add(1.0, 1.0)
    assert verdict(run.decide(0.0)) is Verdict.NEXT_STEP


def test_limits_grow_with_what_the_stable_version_takes() -> None:
    run = progress(timeout_s=10)
    assert run.first_response_limit_s == 10
    assert run.is_overdue(10.1)
    assert not run.is_overdue(9.9)
    run.latencies["stable"].add(0.1, 20.0)
    assert run.is_overdue(1.1)
    assert not run.is_overdue(0.9)  # somebody was impatient
    run.latencies["stable"].add(1.0, 20.0)
    assert run.first_response_limit_s == 10
    assert run.is_overdue(3.1)
    assert not run.is_overdue(2.9)
    run.latencies["stable"].add(5.0, 20.0)
    assert run.first_response_limit_s == 15


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("copy", "differs", "incomparable", "copy fails", "canary", "canary fails", "stable", "time")),
        st.floats(0.001, 10.0),
    ),
    max_size=400,
)
RULES = st.builds(
    RolloutRules,
    shadow=st.just(0.5),
    canary=st.sampled_from(((), (0.1,), (0.1, 0.5, 1.0))),
    requests=st.integers(1, 20),
    seconds=st.sampled_from((0.0, 3.0)),
    max_error_rate=st.sampled_from((0.0, 0.01, 0.5)),
    min_agreement=st.sampled_from((None, 0.5, 1.0)),
    max_latency_ratio=st.sampled_from((None, 1.5)),
)


@given(rules=RULES, events=EVENTS)
def test_whatever_happens_the_rules_hold(rules: RolloutRules, events: list[tuple[str, float]]) -> None:
    """No step passes without its requests and its time, none while something is outside the rules; shares only rise."""
    run = Progress(rules, now=0.0)
    now = entered = 0.0
    share = run.canary_share
    before = 0
    for event, amount in events:
        if event == "time":
            now += amount
        elif event == "stable":
            run.latencies["stable"].add(amount, 2 * amount)
        elif event.startswith("canary"):
            run.candidate_ended(run.canary, "boom" if event == "canary fails" else "")
            run.candidate_timed(amount, 2 * amount)
        else:
            run.candidate_ended(run.shadow, "boom" if event == "copy fails" else "")
            if event in ("copy", "differs"):
                run.compared(equal=event == "copy")
        decision = run.decide(now)
        done = run.canary.succeeded + run.canary.failed if share else run.shadow.succeeded + run.shadow.failed
        if decision is None:
            assert run.canary_share == share
            continue
        if decision.verdict is Verdict.ROLL_BACK:
            assert run.errors.num_bad or run.differences.num_bad or run.ratio("first") is not None
            return
        assert done - before >= rules.requests
        assert now - entered >= rules.seconds
        assert run.errors.rate <= rules.max_error_rate
        assert run.differences.rate <= 1.0 - (rules.min_agreement or 0.0)
        assert rules.max_latency_ratio is None or (run.ratio("first") or 0.0) <= rules.max_latency_ratio
        assert run.canary_share >= share
        if decision.verdict is not Verdict.NEXT_STEP:
            assert run.step == len(rules.steps) - 1
            return
        share, entered = run.canary_share, now
        before = run.canary.succeeded + run.canary.failed
