"""A smaller network that drafts: how its cache follows the answers, and when it is asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmserve.core import SamplingParams
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.draft_engine import DraftEngine
from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner, fake_answer
from llmserve.scheduler.drafts.confidence import Confidence
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.drafts.model import CAUGHT_UP_AT_ONCE, DraftModel, Drawn
from llmserve.scheduler.drafts.token_ids import TokenIds
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import Policy, SchedulerSettings
from llmserve.scheduler.step_costs import StepCosts
from tests.scheduler.harness import GREEDY, INFO, PLAIN, Bench
from tests.scheduler.slots import Slot, Slots

DRAFTING = SchedulerSettings(speculation=Speculation.DRAFT)
IDS = TokenIds(INFO.vocab_size, INFO.vocab_size)
PROMPTS = ((1, 2, 3), (4, 5, 6, 1, 2), (3, 3), (6,))


class Recorder(FakeRunner):
    """Keeps the plans. `wrong` makes every n-th token another one."""

    def __init__(self, info: RunnerInfo = INFO, wrong: int = 0) -> None:
        super().__init__(info)
        self.plans: list[StepPlan] = []
        self._wrong = wrong
        self._num_tokens = 0

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        result = super().step(plan)
        tokens = []
        for token in result.tokens:
            self._num_tokens += 1
            is_wrong = self._wrong and self._num_tokens % self._wrong == 0
            tokens.append((token + 1) % self.info.vocab_size if is_wrong else token)
        return replace(result, tokens=tokens)


@pytest.fixture(autouse=True)
def _steps_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "observe", lambda costs, num_rows, seconds: None)


def bench_of(runner: FakeRunner, settings: SchedulerSettings = DRAFTING, info: RunnerInfo = INFO) -> Bench:
    bench = Bench(info, settings, draft_runner=runner)
    for prompt in PROMPTS:
        bench.add(prompt, replace(GREEDY, max_tokens=24))
    return bench


def test_one_step_drafts_for_all_sequences() -> None:
    info = replace(INFO, max_num_tokens=64)
    runner, plain = Recorder(info), Bench(info)
    bench = bench_of(runner, info=info)
    for prompt in PROMPTS:
        plain.add(prompt, replace(GREEDY, max_tokens=24))
    bench.run()
    plain.run()
    bench.assert_answers()
    assert bench.answers == plain.answers
    assert bench.num_steps < plain.num_steps / 2
    assert max(len(plan.chunks) for plan in runner.plans) == len(PROMPTS)
    num_drafted = bench.scheduler.speculator.num_drafted
    assert len(runner.plans) < num_drafted, "a step for each token"
    assert bench.scheduler.speculator.num_accepted == num_drafted


def test_what_was_not_drawn_is_written_over() -> None:
    runner = Recorder(wrong=3)
    bench = bench_of(runner)
    bench.run()
    bench.assert_answers()
    assert 0 < bench.scheduler.speculator.num_accepted < bench.scheduler.speculator.num_drafted
    computed = sum(plan.num_tokens for plan in runner.plans)
    known = sum(len(prompt) + 24 for prompt in PROMPTS)
    assert computed < known + bench.scheduler.speculator.num_drafted, "it begins anew after each draft"


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_model_with_states_goes_back_where_a_draft_was_wrong(wrong: int) -> None:
    """The fake fails where a state is not that of the tokens before it."""
    plain, runner = Recorder(wrong=wrong), Recorder(replace(INFO, num_states=2 * len(PROMPTS)), wrong=wrong)
    without, bench = bench_of(plain), bench_of(runner)
    for each in (without, bench):
        each.run()
        each.assert_answers()
    assert bench.answers == without.answers
    assert bench.num_steps == without.num_steps
    assert bench.scheduler.speculator.num_accepted == without.scheduler.speculator.num_accepted > 0
    rows, rows_without = (sum(plan.num_tokens for plan in one.plans) for one in (runner, plain))
    assert rows == rows_without if not wrong else rows > rows_without


def test_a_sequence_without_a_state_to_draft_with_is_not_drafted_for() -> None:
    runner = Recorder(replace(INFO, num_states=3))
    bench = bench_of(runner)
    bench.run()
    bench.assert_answers()
    assert {len(plan.chunks) for plan in runner.plans} == {1}


def test_drafts_draw_as_the_engine_does() -> None:
    bench = Bench(INFO, DRAFTING, draft_runner=Recorder())
    bench.add((1, 2, 3), SamplingParams(max_tokens=24, temperature=1.0, seed=5), num_sequences=2)
    bench.run()
    bench.assert_answers()
    assert bench.scheduler.speculator.num_accepted == bench.scheduler.speculator.num_drafted > 0


def test_what_a_guide_forbids_is_not_drafted() -> None:
    runner = Recorder()
    bench = Bench(INFO, DRAFTING, draft_runner=runner)
    guide = Slots(tuple(Slot(frozenset({place % 7, (place + 3) % 7})) for place in range(24)))
    for prompt in PROMPTS:
        bench.add(prompt, replace(GREEDY, max_tokens=24), guide=guide)
    bench.run()
    bench.assert_answers()
    assert bench.scheduler.speculator.num_accepted == bench.scheduler.speculator.num_drafted
    assert bench.num_steps < 12, "drafts are cut where the guide forbids them"


@pytest.mark.parametrize("vocab_size", [5, 9])
def test_vocabularies_may_be_padded_differently(vocab_size: int) -> None:
    runner, guide = Recorder(replace(INFO, vocab_size=vocab_size)), Slots((Slot(frozenset({1, 6})),) * 24)
    bench, plain = bench_of(runner), bench_of(Recorder(), PLAIN)
    for each in (bench, plain):
        each.add((1, 2), replace(GREEDY, max_tokens=20), embedding_bias=((3, 5.0), (6, 4.0)))
        each.add((1, 2), replace(GREEDY, max_tokens=20), guide=guide)
        each.run()
    assert bench.answers == plain.answers
    assert bench.scheduler.speculator.num_accepted > 0
    for chunk in (chunk for plan in runner.plans for chunk in plan.chunks):
        assert max(chunk.token_ids) < min(vocab_size, INFO.vocab_size)
        assert all(token < vocab_size for token, _ in (chunk.sample.bias if chunk.sample else ()))


def test_a_long_prompt_is_caught_up_on_over_several_steps() -> None:
    info = replace(FAKE_RUNNER_INFO, max_num_tokens=2048, max_seq_len=2048, num_blocks=1024)
    runner = Recorder(info)
    bench = Bench(info, DRAFTING, draft_runner=runner)
    prompt = tuple(range(2 * CAUGHT_UP_AT_ONCE + 5))
    [first] = bench.add(prompt, replace(GREEDY, max_tokens=32))
    bench.run()
    assert bench.answers[first] == fake_answer(prompt, 32)
    assert [plan.num_tokens for plan in runner.plans[:2]] == [CAUGHT_UP_AT_ONCE] * 2
    assert bench.scheduler.speculator.num_accepted > 0
    runner.plans.clear()
    bench.add(prompt, replace(GREEDY, max_tokens=32))
    bench.run()
    assert runner.plans[0].num_tokens < 16, "what the last answer left is not found"


def test_blocks_come_back_when_a_sequence_is_cancelled_or_gives_way() -> None:
    info = replace(INFO, num_blocks=16)
    bench = bench_of(Recorder(wrong=4), replace(DRAFTING, policy=Policy.MAX_UTILIZATION), info)
    model = bench.scheduler.speculator.model
    assert model is not None
    for _ in range(5):
        bench.step()
    assert model.pool.num_used > 0
    cancelled, *_ = bench.scheduler.running
    bench.scheduler.cancel(cancelled)
    bench.run()
    bench.assert_answers()
    assert bench.num_preemptions > 0
    assert model.pool.num_used == 0


def test_a_sequence_without_room_is_not_drafted_for() -> None:
    for small in (replace(INFO, max_seq_len=3), replace(INFO, num_blocks=1), replace(INFO, max_batch_size=1)):
        bench = bench_of(Recorder(small))
        bench.run()
        bench.assert_answers()
        assert len(bench.reasons) == len(PROMPTS)


def test_a_request_that_wants_no_drafts_costs_no_step() -> None:
    runner = Recorder()
    bench = Bench(INFO, DRAFTING, draft_runner=runner)
    bench.add((1, 2, 3), speculation=False)
    bench.run()
    assert runner.plans == []


def test_a_step_of_the_model_counts_among_the_costs() -> None:
    model = DraftModel(INFO.scheduler_config(DRAFTING), lambda plan: None, IDS, prior_cost=0.5)
    costs = StepCosts()
    assert model.cost(1, 0.0) == 0.5
    assert model.cost(4, 0.0) == 0.125  # shared
    assert costs.threshold(1, model.cost(1, 0.0)) > costs.threshold(1, model.cost(4, 0.0)) > costs.threshold(1)


def test_what_the_model_was_worth_to_others_is_known_to_the_next_sequence() -> None:
    model = DraftModel(INFO.scheduler_config(DRAFTING), lambda plan: None, IDS, prior_cost=0.1)
    first, threshold = model.drafter(), 0.3
    assert model.drafter().num_likely(threshold) > 0
    for _ in range(5):
        first.learn(3, 0)
    assert model.drafter().num_likely(threshold) == 0


class Unsure(Recorder):
    """Always right, and says of every token how likely it is."""

    def __init__(self, log_prob: float) -> None:
        super().__init__()
        self._log_prob = log_prob

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        return replace(result, log_probs=[self._log_prob] * len(result.tokens))


def test_behind_a_token_that_the_model_is_unsure_of_no_more_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Confidence, "learn", lambda confidence, log_prob, is_drawn: None)

    def num_drafted_at_once(log_prob: float) -> float:
        bench = Bench(INFO, DRAFTING, draft_runner=Unsure(log_prob))
        bench.add((1, 2, 3), replace(GREEDY, max_tokens=24))
        bench.run()
        bench.assert_answers()
        return bench.scheduler.speculator.num_drafted / bench.num_steps

    assert num_drafted_at_once(0.0) > 3 > 2 > num_drafted_at_once(-4.0) > 0


def test_what_a_model_says_of_its_tokens_counts_until_it_was_wrong() -> None:
    confidence = Confidence()
    assert confidence.probability(-0.01) > 0.9 > 0.1 > confidence.probability(-5.0)
    for _ in range(200):
        confidence.learn(-0.01, is_drawn=False)
        confidence.learn(-5.0, is_drawn=True)
    assert confidence.probability(-5.0) > 0.9 > 0.1 > confidence.probability(-0.01)


def test_the_time_of_a_step_is_measured() -> None:
    assert cost_of_steps(2.0) == pytest.approx(0.5)
    assert cost_of_steps(2.0, then=1.0) < 0.4
    assert cost_of_steps(2.0, planning=1.0) > 0.55


def test_a_step_that_was_interrupted_hardly_counts() -> None:
    assert cost_of_steps(2.0, 2.0, 40.0) < 0.52


def cost_of_steps(*seconds: float, then: float = 2.0, planning: float = 0.0) -> float:
    """The cost of a drafted token, as a part of 4 s. `then`: seconds of each step after the first ones; `planning`:
    seconds between steps that follow each other."""
    bench, runner, now = Bench(INFO, DRAFTING), Recorder(), 0.0

    def step(plan: StepPlan) -> Drawn:
        nonlocal now
        now += [*seconds, then][min(len(runner.plans), len(seconds))]
        result = runner.step(plan)
        return Drawn(result.tokens, result.log_probs)

    class Planning(DraftModel):
        def _following(self, *arguments: Any) -> Any:
            nonlocal now
            now += planning
            return super()._following(*arguments)

    model = Planning(INFO.scheduler_config(DRAFTING), step, IDS, prior_cost=0.1, clock=lambda: now)
    bench.scheduler.speculator.model = model
    bench.add((1,), replace(GREEDY, max_tokens=40))
    while len(runner.plans) < 10:
        bench.step()
    return model.cost(1, 4.0)


def test_answers_go_on_when_the_model_fails(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(INFO, fail_at_step=3)
    engine = DraftEngine(runner, INFO)
    bench = Bench(INFO, DRAFTING)
    bench.scheduler.speculator.model = engine.model
    bench.add((1, 2, 3), replace(GREEDY, max_tokens=40))
    bench.run()
    bench.assert_answers()
    assert runner.num_steps == 3
    assert caplog.text.count("the draft engine failed; speculative decoding with it is off") == 1
    engine.close()
    assert runner.is_closed


def test_one_wrong_draft_does_not_turn_a_model_off_for_short_answers() -> None:
    """Each answer ends long before its own drafter would try again."""
    model = DraftModel(INFO.scheduler_config(DRAFTING), lambda plan: None, IDS, prior_cost=0.5)
    threshold = StepCosts().threshold(1, 0.5)
    model.drafter().learn(1, 0)
    assert model.drafter().num_likely(threshold), "the first drafts of an engine say little"
    for _ in range(3):
        model.drafter().learn(1, 0)
    assert not model.drafter().num_likely(threshold)
    num_steps = 0
    while not model.drafter().num_likely(threshold):
        model.rest()
        num_steps += 1
    assert 3 < num_steps < 60
