"""Laws that hold for every load: found by Hypothesis, checked against answers worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from llmserve.core import FinishReason, GenerateRequest, SamplingParams
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.fake import FakeRunner, fold
from llmserve.errors import Unsupported
from llmserve.scheduler import scheduler as scheduler_module
from llmserve.scheduler import sequence as sequence_module
from llmserve.scheduler.blocks import BlockPool
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import MAX_DRAFTED, Speculation
from llmserve.scheduler.drafts.lookup import LookupDrafter
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import Policy, SchedulerSettings, WindowedLayers
from tests.scheduler.harness import INFO, Bench, answer_alone
from tests.scheduler.layers import HIDDEN_WIDTH, LayerRunner
from tests.scheduler.slots import Slot, Slots

MAX_PROMPT = 20
MAX_OUTPUT = 16
MAX_LENGTH = MAX_PROMPT + MAX_OUTPUT

token_ids = st.integers(0, INFO.vocab_size - 1)
words = st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)
# few different beginnings, so that prompts share blocks
prompts = st.builds(
    lambda beginning, end: (beginning * 3 + end)[:MAX_PROMPT],
    st.sampled_from([(), (1, 2, 3, 4), (1, 2, 3, 5), (6, 6, 6, 6, 6)]),
    st.lists(token_ids, min_size=1, max_size=8).map(tuple),
)

slots = st.builds(Slot, st.frozensets(token_ids, max_size=3) | st.frozensets(token_ids, min_size=1, max_size=1))
guides = st.lists(st.builds(replace, slots, may_end=st.booleans()), min_size=1, max_size=MAX_OUTPUT).map(
    lambda found: Slots(tuple(found))
)


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    max_tokens = draw(st.integers(1, MAX_OUTPUT))
    draft_ids = draw(st.lists(token_ids, max_size=MAX_OUTPUT).map(tuple))
    return GenerateRequest(
        request_id="r",
        draft_ids=draft_ids,
        prompt_ids=draw(prompts),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
        ),
        end_id=draw(st.none() | token_ids),
        stop_ids=draw(words),
        bad_ids=draw(words),
        guide=draw(st.none() | guides),
        num_sequences=draw(st.sampled_from([1, 1, 1, 2, 4])),
        priority=draw(st.integers(-2, 2)),
        return_prompt_log_probs=draw(st.booleans()),
        return_context_logits=draw(st.booleans()),
        return_generation_logits=draw(st.booleans()),
        speculation=draw(st.sampled_from([True, True, False])),
        num_top_log_probs=draw(st.integers(0, 2)),
    )


windowed_layers = st.builds(WindowedLayers, st.integers(1, 12), st.integers(1, 3), st.sampled_from([1, 2, 5, 64]))


@st.composite
def limits(draw: st.DrawFn) -> RunnerInfo:
    """Runners from roomy to so tight that only the largest request fits, alone, one token per step."""
    block_size = draw(st.sampled_from([1, 3, 4, 8]))
    windowed = draw(st.just(WindowedLayers()) | windowed_layers)
    least = -(-MAX_LENGTH // block_size) + windowed.num_blocks_for(MAX_LENGTH, block_size)
    return replace(
        INFO,
        block_size=block_size,
        num_blocks=draw(st.integers(least, 3 * least)),
        max_num_tokens=draw(st.integers(1, 24)),
        max_batch_size=draw(st.integers(1, 6)),
        num_states=draw(st.just(0) | st.integers(1, 12)),
        state_bytes=draw(st.integers(1, 4)),  # in blocks, between two states that are kept
        block_bytes=1,
        windowed_layers=windowed,
    )


class DraftRunner(FakeRunner):
    """Draws what the runner draws, but now and then something else."""

    def __init__(self, info: RunnerInfo, wrong_every: int) -> None:
        super().__init__(info)
        self._wrong_every = wrong_every
        self.num_drafted = 0

    def step(self, plan: StepPlan) -> StepResult:
        tokens = []
        for token in super().step(plan).tokens:
            self.num_drafted += 1
            is_wrong = self.num_drafted % self._wrong_every == 0
            tokens.append((token + 1) % self.info.vocab_size if is_wrong else token)
        return StepResult(tokens, [0.0] * len(tokens))


@st.composite
def draft_runners(draw: st.DrawFn) -> FakeRunner | None:
    """With limits of their own, some too small for most sequences; smaller networks, and layers that read rows."""
    if draw(st.booleans()):
        return None
    info = replace(
        INFO,
        block_size=draw(st.sampled_from([1, 3, 8])),
        num_blocks=draw(st.integers(1, 60)),
        max_num_tokens=draw(st.integers(1, 24)),
        max_batch_size=draw(st.integers(1, 6)),
        max_seq_len=draw(st.integers(1, 64)),
        num_states=draw(st.just(0) | st.integers(1, 9)),
        windowed_layers=draw(st.just(WindowedLayers()) | windowed_layers),
    )
    wrong_every = draw(st.sampled_from([1, 2, 5, 1000]))
    if draw(st.booleans()):
        return LayerRunner(replace(info, num_states=0, hidden_width=HIDDEN_WIDTH), wrong_every)
    return DraftRunner(info, wrong_every)


scheduler_settings = st.builds(
    SchedulerSettings,
    policy=st.sampled_from(Policy),
    enable_block_reuse=st.booleans(),
    priority_step=st.sampled_from([1, 3, 1000]),
    speculation=st.sampled_from(
        [Speculation.OFF, *Speculation, Speculation.ALL, Speculation.DRAFT | Speculation.GRAMMAR]
    ),
)


@pytest.fixture(autouse=True, scope="module")
def guesses() -> Iterator[None]:
    """Drafts that are right to the end, right for a while, or nonsense, as long as they may be; or what was found."""
    found = LookupDrafter.propose

    def propose(self: LookupDrafter, sequence: Sequence, threshold: float) -> list[int]:
        answer, _ = answer_alone(sequence.request, sequence.index, INFO)
        right = (answer[sequence.num_output :] + [0] * MAX_DRAFTED)[:MAX_DRAFTED]
        num_right = random.Random(fold(sequence.token_ids)).choice([0, 1, 4, MAX_DRAFTED, None])
        if num_right is None:
            return list(found(self, sequence, 0.0))
        return [token if place < num_right else place % INFO.vocab_size for place, token in enumerate(right)]

    with (
        patch.object(LookupDrafter, "propose", propose),
        patch.object(Acceptance, "num_worthwhile", return_value=MAX_DRAFTED),
    ):
        yield


def max_num_steps(bench: Bench) -> int:
    """Enough for every load: the first of the running sequences ends within its own length, and at most as many
    others can come before it as there are sequences."""
    return len(bench.sequences) ** 2 * MAX_LENGTH + 1


@settings(max_examples=150)
@given(
    st.lists(st.tuples(requests(), st.integers(0, 4)), min_size=1, max_size=8),
    limits(),
    scheduler_settings,
    st.booleans(),
    draft_runners(),
)
def test_answers_do_not_depend_on_load_limits_or_policy(
    arrivals: list[tuple[GenerateRequest, int]],
    info: RunnerInfo,
    options: SchedulerSettings,
    foresees: bool,
    draft_runner: FakeRunner | None,
) -> None:
    bench = Bench(info, options, foresees=foresees, draft_runner=draft_runner)
    for request, num_steps_between in arrivals:
        bench.submit(request)
        for _ in range(num_steps_between):
            bench.step()
    bench.run(max_num_steps(bench))
    bench.assert_answers()
    assert len(bench.reasons) == len(bench.sequences)
    if options.policy is Policy.GUARANTEED_NO_EVICT:
        assert bench.num_preemptions == 0
        num_wasted = len(bench.sequences) if foresees else 0  # steps of who had just ended
        assert bench.num_steps <= sum(s.num_tokens for s in bench.sequences.values()) + num_wasted


@settings(max_examples=40)
@given(st.lists(requests(), min_size=2, max_size=6), limits(), scheduler_settings, st.randoms())
def test_answers_do_not_depend_on_order_of_arrival(
    arrivals: list[GenerateRequest], info: RunnerInfo, options: SchedulerSettings, random: random.Random
) -> None:
    shuffled = random.sample(arrivals, len(arrivals))
    answers = []
    for order in (arrivals, shuffled):
        bench = Bench(info, options)
        ids = {id(request): bench.submit(request) for request in order}
        bench.run()
        answers.append([[bench.answers[i] for i in ids[id(request)]] for request in arrivals])
    assert answers[0] == answers[1]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, are cancelled and time out between steps, in any order."""

    @rule(info=limits(), options=scheduler_settings, foresees=st.booleans(), draft_runner=draft_runners())
    def restart(
        self, info: RunnerInfo, options: SchedulerSettings, foresees: bool, draft_runner: FakeRunner | None
    ) -> None:
        self.bench = Bench(info, options, foresees=foresees, draft_runner=draft_runner)

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(replace(INFO, num_blocks=12), SchedulerSettings(policy=Policy.MAX_UTILIZATION))

    @rule(request=requests(), patience=st.none() | st.integers(0, 12))
    def submit(self, request: GenerateRequest, patience: int | None) -> None:
        self.bench.submit(replace(request, deadline=None if patience is None else self.bench.now + patience))

    @rule(choice=st.randoms(use_true_random=False))
    def cancel(self, choice: random.Random) -> None:
        live = [*self.bench.scheduler.waiting, *self.bench.scheduler.running.values()]
        if live:
            sequence = choice.choice(live)
            self.bench.scheduler.cancel(sequence.id)
            assert not sequence.block_table

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            decoding = {s.id for s in self.bench.scheduler.running.values() if s.num_pending == 1}
            preempted = self.bench.num_preemptions
            plan = self.bench.step()
            if self.bench.num_preemptions == preempted:
                planned = {chunk.sequence_id for chunk in plan.chunks} if plan else set()
                ended = {i for i in decoding if self.bench.reasons.get(i) is FinishReason.TIMED_OUT}
                assert decoding - ended <= planned, "a decoding sequence had to wait for a prompt"

    @invariant()
    def laws_hold(self) -> None:
        self.bench.check()

    def teardown(self) -> None:
        self.bench.run(max_num_steps(self.bench))
        self.bench.assert_answers()


def test_any_sequence_of_arrivals_steps_cancellations_and_deadlines() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=60, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


def test_a_low_priority_is_overtaken_a_bounded_number_of_times() -> None:
    """High priorities arrive without end; the low one runs after `priority_step` of them per level."""
    info = replace(INFO, max_batch_size=1)
    bench = Bench(info, SchedulerSettings(priority_step=5))
    bench.add([1], replace(SamplingParams(), max_tokens=2), priority=2)
    [low] = bench.add([1, 1], priority=0)
    num_arrivals = 0
    while low not in bench.reasons:
        bench.add([1, 2], replace(SamplingParams(), max_tokens=1), priority=2)
        num_arrivals += 1
        bench.step()
        assert num_arrivals < 50, "the low priority starves"
    first_scheduled = bench.sequences[low].first_scheduled_ns
    overtakers = [s for s in bench.sequences.values() if s.id > low and 0 < s.first_scheduled_ns < first_scheduled]
    assert len(overtakers) == 2 * 5 - 1  # ids 2 to 10; with id 11 it is a tie, which the older one wins


# Negative controls: each fault must be found by the harness, or the tests above prove nothing.


class SwappingRunner(FakeRunner):
    """Gives the first two chunks that are sampled each other's token."""

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        tokens = list(result.tokens)
        tokens[:2] = reversed(tokens[:2])
        return StepResult(tokens, result.log_probs)


class DoublePool(BlockPool):
    """Forgets to take a block from the free list."""

    def allocate(self, num_blocks: int, *, counts: bool = True) -> list[int]:
        blocks = super().allocate(num_blocks, counts=counts)
        if blocks:
            self._free[blocks[-1]] = None
        return blocks


class LeakingPool(BlockPool):
    """Forgets the last block of a table."""

    def release(self, blocks: list[int]) -> None:  # type: ignore[override]
        super().release(blocks[:-1])


class GreedyScheduler(Scheduler):
    """Takes the whole prompt from the cache, so that nothing is left to compute."""

    def _num_shareable(self, num_tokens: int) -> int:
        return super()._num_shareable(num_tokens + 1)


class EarlyScheduler(Scheduler):
    """Shares blocks before they are computed."""

    def _start(self, sequence: Sequence) -> bool:
        started = super()._start(sequence)
        if started:
            num_full = sequence.num_tokens // self.config.block_size
            for block, block_hash in zip(
                sequence.block_table, sequence.block_hashes(num_full, self.config.block_size), strict=False
            ):
                self.pool.register(block, block_hash, b"", ())
        return started


def broken_bench(fault: str, info: RunnerInfo, options: SchedulerSettings) -> Bench:
    if fault == "swapped sequences":
        return Bench(info, options, runner=SwappingRunner(info))
    if fault == "nothing left to compute":
        return Bench(info, options, scheduler_class=GreedyScheduler)
    if fault == "shared too early":
        return Bench(info, options, scheduler_class=EarlyScheduler)
    pool_class = DoublePool if fault == "block owned twice" else LeakingPool
    with patch.object(scheduler_module, "BlockPool", pool_class):
        return Bench(info, options)


def run_random_loads(make_bench: Callable[[RunnerInfo, SchedulerSettings], Bench]) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        info = replace(INFO, num_blocks=rng.randint(9, 20), max_num_tokens=rng.randint(1, 24))
        bench = make_bench(info, SchedulerSettings(policy=rng.choice(list(Policy))))
        for _ in range(6):
            beginning = rng.choice([(), (1, 2, 3, 4) * 2, (5, 2, 3, 4) * 2])
            end = tuple(rng.choices(range(7), k=rng.randint(0, 8) if beginning else 1))
            bench.add(beginning + end, SamplingParams(max_tokens=9))
            if rng.random() < 0.5:
                bench.step()
        bench.run(1000)
        bench.assert_answers()


def test_random_loads_pass_without_a_fault() -> None:
    run_random_loads(Bench)


@pytest.mark.parametrize(
    "fault",
    ["swapped sequences", "nothing left to compute", "shared too early", "block owned twice", "lost block"],
)
def test_a_fault_is_found(fault: str) -> None:
    with pytest.raises((AssertionError, KeyError, Unsupported)):
        run_random_loads(lambda info, options: broken_bench(fault, info, options))


def test_a_hash_without_its_parent_is_found() -> None:
    unchained = lambda parent, token_ids: bytes(token_ids)  # noqa: E731
    with patch.object(sequence_module, "hash_block", unchained), pytest.raises(AssertionError):
        run_random_loads(Bench)


def test_the_oracle_knows_every_way_to_end() -> None:
    """Worked by hand with `fold`, vocabulary 7, prompt (3): h = 4, 17, 55, 172 -> tokens 4, 3, 6, 4."""
    request = GenerateRequest("r", (3,), SamplingParams(max_tokens=4, temperature=0.0))
    assert answer_alone(request, 0, INFO) == ([4, 3, 6, 4], FinishReason.LENGTH)
    assert answer_alone(replace(request, end_id=6), 0, INFO) == ([4, 3], FinishReason.END_ID)
    assert answer_alone(replace(request, stop_ids=((3, 6), (6,))), 0, INFO) == ([4], FinishReason.STOP_WORDS)
    assert answer_alone(replace(request, bad_ids=((3, 4),)), 0, INFO)[0][0] == 5
    assert answer_alone(replace(request, prompt_ids=(3,) * (INFO.max_seq_len - 1)), 0, INFO)[1] is FinishReason.LENGTH
