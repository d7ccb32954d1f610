"""The step thread and its borders: many consumers, several loops, clients that leave, runners that fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from llmserve.core import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.base import EngineInfo, RunnerInfo, StepResult
from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner, fake_answer, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.errors import InternalError, InvalidArgument, PromptTooLong, ResourceExhausted, Unavailable
from llmserve.scheduler.plan import Chunk, StepPlan
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.engine.fake.pipelined import PipelinedFakeRunner

LONG = 200
INFO = EngineInfo("test", "fake", "Fake", "int", "", 1000, 256, 32, 64)


class RecordingRunner(FakeRunner):
    """Keeps its plans, and waits at `gate` before every step."""

    def __init__(self, info: RunnerInfo = FAKE_RUNNER_INFO, **options: float) -> None:
        super().__init__(info, **options)  # type: ignore[arg-type]
        self.plans: list[StepPlan] = []
        self.gate = threading.Event()
        self.gate.set()

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        assert self.gate.wait(20)
        return super().step(plan)


@contextmanager
def opened(runner: FakeRunner | None = None, settings: SchedulerSettings | None = None) -> Iterator[InflightEngine]:
    engine = InflightEngine(runner or FakeRunner(), INFO, settings)
    try:
        yield engine
    finally:
        engine.close()


def request(*prompt: int, max_tokens: int = 5, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest("r", prompt or (1, 2, 3), sampling, **fields)  # type: ignore[arg-type]


async def tokens_of(stream: AsyncGenerator[TokenEvent, None]) -> list[int]:
    async with aclosing(stream):
        return [token async for event in stream for token in event.token_ids]


async def held(
    engine: InflightEngine, runner: RecordingRunner
) -> tuple[AsyncGenerator[TokenEvent, None], asyncio.Task[TokenEvent]]:
    """A request whose first step waits at the gate, and the task that waits for its first token."""
    runner.gate.clear()
    running = engine.submit(request(1, max_tokens=20))
    first = asyncio.ensure_future(anext(running))
    await until(lambda: runner.plans)
    return running, first


async def until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def test_memory_that_looks_free_and_is_promised_is_told() -> None:
    """Weights, and the blocks that no sequence uses: those that are used have taken theirs."""

    class OneStepAGate(RecordingRunner):
        def step(self, plan: StepPlan) -> StepResult:
            result = super().step(plan)
            self.gate.clear()
            return result

    info = replace(FAKE_RUNNER_INFO, num_blocks=24, block_size=4, weight_bytes=1000, block_bytes=10)
    runner = OneStepAGate(replace(info, num_states=9, state_bytes=7))
    with opened(runner) as engine:
        assert engine.stats().promised_bytes == 1000 + 24 * 10 + 9 * 7
        stream = engine.submit(request(1, 2, 3, max_tokens=80))
        await anext(stream)
        stats = engine.stats()
        assert stats.promised_bytes == 1000 + stats.free_num_blocks * 10 + stats.free_num_states * 7
        assert (stats.max_num_states, stats.free_num_states) == (9, 8)
        assert stats.free_num_blocks < 24
        await stream.aclose()
        runner.gate.set()


async def test_the_worked_example_streams() -> None:
    with opened() as engine:
        assert await tokens_of(engine.submit(request(1, 2, 3, max_tokens=4))) == [31, 125, 501, 11]


@pytest.mark.parametrize("policy", Policy)
async def test_many_streams_get_the_answers_that_they_get_alone(policy: Policy) -> None:
    tight = replace(FAKE_RUNNER_INFO, num_blocks=24, max_num_tokens=16, max_batch_size=8)
    prompts = [(7,) * (number % 5) + tuple(range(number % 9 + 1)) for number in range(100)]
    with opened(FakeRunner(tight), SchedulerSettings(policy=policy)) as engine:
        answers = await asyncio.gather(*(tokens_of(engine.submit(request(*p, max_tokens=40))) for p in prompts))
        await until(lambda: engine.stats().num_active_requests == 0)
        assert engine.stats().free_num_blocks == 24
    assert answers == [fake_answer(prompt, 40) for prompt in prompts]


async def test_closing_a_stream_frees_its_blocks_within_one_step() -> None:
    runner = RecordingRunner()
    with opened(runner) as engine:
        leaving = engine.submit(request(1, max_tokens=LONG))
        staying = engine.submit(request(2, max_tokens=LONG))
        await anext(leaving)
        await anext(staying)
        runner.gate.clear()  # a step runs, or is about to
        num_plans = len(runner.plans)
        await leaving.aclose()
        runner.gate.set()
        assert await tokens_of(staying) == fake_answer([2], LONG)[1:]
    assert not any(chunk.sequence_id == 0 for plan in runner.plans[num_plans + 1 :] for chunk in plan.chunks)


async def test_cancelling_the_consumer_cancels_the_sequence() -> None:
    runner = RecordingRunner(step_delay_s=0.002)
    with opened(runner) as engine:
        task = asyncio.create_task(tokens_of(engine.submit(request(max_tokens=LONG, num_sequences=3))))
        await until(lambda: engine.stats().num_active_requests == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.stats().num_active_requests == 0)
        assert engine.stats().used_num_blocks == 0
        assert runner.num_steps < LONG


async def test_a_waiting_request_can_be_cancelled() -> None:
    runner = RecordingRunner(replace(FAKE_RUNNER_INFO, max_batch_size=1))
    with opened(runner) as engine:
        running, first = await held(engine, runner)
        waiting = asyncio.create_task(tokens_of(engine.submit(request(2))))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        runner.gate.set()
        await first
        await tokens_of(running)
        await until(lambda: engine.stats().num_active_requests == 0)
    assert {chunk.sequence_id for plan in runner.plans for chunk in plan.chunks} == {0}


async def test_streams_may_live_on_different_loops() -> None:
    answers: dict[int, list[int]] = {}

    async def consume(number: int) -> None:
        answers[number] = await tokens_of(engine.submit(request(number, max_tokens=LONG)))

    async def consume_some(first: int) -> None:
        await asyncio.gather(*(consume(number) for number in range(first, first + 8)))

    with opened() as engine:
        threads = [threading.Thread(target=asyncio.run, args=(consume_some(first),)) for first in (0, 8)]
        for thread in threads:
            thread.start()
        await consume_some(16)
        for thread in threads:
            await asyncio.to_thread(thread.join, 20)
    assert answers == {number: fake_answer([number], LONG) for number in range(24)}


async def test_a_step_makes_one_call_per_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    num_calls = 0
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counting(*args: object, **options: object) -> object:
        nonlocal num_calls
        num_calls += 1
        return call_soon_threadsafe(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
    runner = FakeRunner()
    with opened(runner) as engine:
        await asyncio.gather(*(tokens_of(engine.submit(request(number, max_tokens=20))) for number in range(30)))
        assert 20 <= num_calls <= runner.num_steps


async def test_the_time_of_a_step_counts_what_follows_it_and_not_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifying costs, and drafts are worth less for it. A draft engine runs while a step is planned, and what it takes
    is counted apart."""
    clock = [0.0]
    observed: list[float] = []

    class Slow(FakeRunner):
        def step(self, plan: StepPlan) -> StepResult:
            clock[0] += 1
            return super().step(plan)

    with opened(Slow()) as engine:
        scheduler = engine._scheduler
        schedule, commit = scheduler.schedule, scheduler.commit

        def planned() -> StepPlan | None:
            clock[0] += 10
            return schedule()

        def committed(*arguments: Any) -> list[tuple[int, TokenEvent]]:
            clock[0] += 100
            return commit(*arguments)

        monkeypatch.setattr(scheduler, "schedule", planned)
        monkeypatch.setattr(scheduler, "commit", committed)
        monkeypatch.setattr(scheduler.speculator, "observe", lambda plan, seconds: observed.append(seconds))
        monkeypatch.setattr("llmserve.engine.inflight.time.perf_counter", lambda: clock[0])
        assert len(await tokens_of(engine.submit(request(max_tokens=3)))) == 3
    assert observed[:2] == [101.0, 101.0]


async def test_a_loop_that_is_gone_takes_its_sequences_along() -> None:
    loop = asyncio.new_event_loop()
    runner = RecordingRunner(step_delay_s=0.002)
    with opened(runner) as engine:
        stream = engine.submit(request(max_tokens=LONG))
        await asyncio.to_thread(loop.run_until_complete, stream.asend(None))
        loop.close()
        await until(lambda: engine.stats().num_active_requests == 0)
        assert runner.num_steps < LONG
        assert engine.healthy()
        assert await tokens_of(engine.submit(request(1))) == fake_answer([1], 5)
        await stream.aclose()


async def test_a_slow_consumer_does_not_hold_up_the_others() -> None:
    runner = FakeRunner()
    with opened(runner) as engine:
        slow = engine.submit(request(1, max_tokens=50))
        await anext(slow)  # and then nothing for a while
        assert await tokens_of(engine.submit(request(2, max_tokens=LONG))) == fake_answer([2], LONG)
        await until(lambda: engine.stats().num_active_requests == 0)
        assert await tokens_of(slow) == fake_answer([1], 50)[1:]


async def test_a_failing_runner_ends_every_stream_with_one_error() -> None:
    runner = RecordingRunner(replace(FAKE_RUNNER_INFO, max_batch_size=2), fail_at_step=3)
    with opened(runner) as engine:
        late = engine.submit(request(9))
        tasks = [asyncio.create_task(tokens_of(engine.submit(request(n, max_tokens=LONG)))) for n in range(4)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [InternalError] * 4
        assert "step 3 was told to fail" in str(results[0])
        assert len({id(result) for result in results}) == 4
        assert not engine.healthy()
        with pytest.raises(Unavailable, match="told to fail"):
            engine.submit(request(1))
        with pytest.raises(Unavailable):
            await anext(late)
        await until(lambda: runner.is_closed)


async def test_an_integrity_error_is_not_hidden() -> None:
    with opened() as engine:
        await tokens_of(engine.submit(request(1)))
        await until(lambda: engine.stats().used_num_blocks == 0)
        engine._scheduler.pool.allocate(1)  # a block that no sequence owns
        await tokens_of(engine.submit(request(2)))
        await until(lambda: not engine.healthy())
        with pytest.raises(Unavailable, match="reference counts"):
            engine.submit(request(1))


async def test_close_does_not_wait_for_the_consumers_of_a_running_step() -> None:
    runner = RecordingRunner()
    engine = InflightEngine(runner, INFO)
    _, first = await held(engine, runner)
    closing = asyncio.create_task(asyncio.to_thread(engine.close))
    with pytest.raises(Unavailable):
        await first
    assert not closing.done()
    runner.gate.set()
    await closing
    assert runner.is_closed


def test_an_engine_without_requests_closes() -> None:
    engine = fake_engine()
    assert engine.healthy()
    engine.close()
    engine.close()
    assert not engine.healthy()


async def test_a_deadline_ends_a_running_answer() -> None:
    with opened(FakeRunner(step_delay_s=0.005)) as engine:
        async with aclosing(engine.submit(request(max_tokens=LONG, deadline=time.monotonic() + 0.05))) as stream:
            events = [event async for event in stream]
        assert events[-1].finish_reason is FinishReason.TIMED_OUT
        assert 1 <= len(events) < 40
        await until(lambda: engine.stats().used_num_blocks == 0)


async def test_a_full_queue_refuses_on_the_first_pull() -> None:
    runner = RecordingRunner(replace(FAKE_RUNNER_INFO, max_batch_size=1))
    with opened(runner, SchedulerSettings(max_queue_size=2)) as engine:
        running, first = await held(engine, runner)
        waiting = [asyncio.create_task(tokens_of(engine.submit(request(number)))) for number in (2, 3)]
        await asyncio.sleep(0.01)
        refused = engine.submit(request(4))
        with pytest.raises(ResourceExhausted, match="queue is full"):
            await anext(refused)
        runner.gate.set()
        await first
        assert await asyncio.gather(*waiting) == [fake_answer([2], 5), fake_answer([3], 5)]
        await running.aclose()


async def test_every_answer_of_a_request_needs_room_in_the_queue() -> None:
    runner = RecordingRunner(replace(FAKE_RUNNER_INFO, max_batch_size=1))
    with opened(runner, SchedulerSettings(max_queue_size=2)) as engine:
        running, first = await held(engine, runner)
        with pytest.raises(ResourceExhausted, match="3 more arrive"):
            await anext(engine.submit(request(2, num_sequences=3)))
        waiting = asyncio.create_task(tokens_of(engine.submit(request(3, num_sequences=2))))
        await asyncio.sleep(0.01)
        runner.gate.set()
        await first
        assert len(await waiting) == 10
        with pytest.raises(InvalidArgument, match="asks for 4 answers, but batch and queue have room for 3"):
            engine.submit(request(4, num_sequences=4))
        await running.aclose()


async def test_a_sequence_that_is_just_starting_does_not_also_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, planning, go_on = Sequence.chunk, threading.Event(), threading.Event()

    def slow_chunk(self: Sequence, num_tokens: int) -> Chunk:
        planning.set()  # in the middle of `schedule`
        assert go_on.wait(20)
        return chunk(self, num_tokens)

    monkeypatch.setattr(Sequence, "chunk", slow_chunk)
    with opened(
        RecordingRunner(replace(FAKE_RUNNER_INFO, max_batch_size=1)), SchedulerSettings(max_queue_size=1)
    ) as engine:
        first = asyncio.create_task(tokens_of(engine.submit(request(1))))
        assert await asyncio.to_thread(planning.wait, 20)
        second = asyncio.create_task(tokens_of(engine.submit(request(2))))
        await asyncio.sleep(0.01)
        go_on.set()
        assert list(await asyncio.gather(first, second)) == [fake_answer([1], 5), fake_answer([2], 5)]


async def test_time_in_front_of_the_step_thread_is_queue_time() -> None:
    runner = RecordingRunner()
    with opened(runner) as engine:
        running, first = await held(engine, runner)
        before = time.time_ns()
        late = asyncio.create_task(anext(engine.submit(request(2))))
        await asyncio.sleep(0)  # it is submitted
        after = time.time_ns()
        await asyncio.sleep(0.01)
        released = time.time_ns()
        runner.gate.set()
        await first
        usage = (await late).usage
        assert usage is not None
        assert before <= usage.arrival_ns <= after
        assert usage.first_scheduled_ns >= released
        await running.aclose()


async def test_no_sequence_is_longer_than_the_kv_cache(caplog: pytest.LogCaptureFixture) -> None:
    """The last token of an answer is not in it."""
    with opened(FakeRunner(replace(FAKE_RUNNER_INFO, num_blocks=4))) as engine:
        assert engine.info.max_seq_len == 17
        assert len(await tokens_of(engine.submit(request(1, 2, max_tokens=16)))) == 15
        with pytest.raises(PromptTooLong, match="takes at most 16"):
            engine.submit(request(*range(17)))
    assert "may have 17 tokens, not" in caplog.text
    with opened(FakeRunner(replace(FAKE_RUNNER_INFO, num_blocks=4, output_width=2))) as engine:
        assert engine.info.max_seq_len == 16


async def test_an_idle_engine_uses_no_processor() -> None:
    runner = FakeRunner()
    with opened(runner) as engine:
        await tokens_of(engine.submit(request(1)))
        await until(lambda: engine.stats().num_active_requests == 0)
        num_steps, started = runner.num_steps, time.process_time()
        await asyncio.sleep(0.3)
        assert runner.num_steps == num_steps
        assert time.process_time() - started < 0.1


async def test_stats_tell_what_the_last_step_did() -> None:
    runner = RecordingRunner(replace(FAKE_RUNNER_INFO, max_num_tokens=8, max_batch_size=2), step_delay_s=0.005)
    with opened(runner) as engine:
        empty = engine.stats()
        assert (empty.iteration, empty.free_num_blocks, empty.tokens_per_block) == (0, 256, 4)
        decoding = engine.submit(request(1, max_tokens=100))
        await anext(decoding)
        prompts = [asyncio.create_task(tokens_of(engine.submit(request(*([2] * 100))))) for _ in range(2)]
        await until(lambda: engine.stats().num_active_requests == 3 and engine.stats().num_context_requests == 1)
        stats = engine.stats()
        assert (stats.num_scheduled_requests, stats.num_gen_requests, stats.num_ctx_tokens) == (2, 1, 7)
        assert (stats.num_active_requests, stats.num_waiting_requests) == (3, 1)
        assert stats.used_num_blocks + stats.free_num_blocks == stats.max_num_blocks == 256
        await asyncio.gather(*prompts)
        await until(lambda: engine.stats().reused_blocks == 24)
        await decoding.aclose()


def pipelined(**options: object) -> PipelinedFakeRunner:
    return PipelinedFakeRunner(FAKE_RUNNER_INFO, **options)  # type: ignore[arg-type]


async def test_steps_are_begun_before_the_last_ones_tokens_are_known() -> None:
    """With the same answers, and tokens counted that somebody got."""
    runner = pipelined()
    with opened(runner) as engine:
        third = fake_answer((1, 2, 3), 3)[2]
        long, short, ended = await asyncio.gather(
            tokens_of(engine.submit(request(1, 2, 3, max_tokens=20))),
            tokens_of(engine.submit(request(4, max_tokens=3))),
            tokens_of(engine.submit(request(1, 2, 3, max_tokens=20, end_id=third))),
        )
        assert (long, short) == (fake_answer((1, 2, 3), 20), fake_answer((4,), 3))
        assert ended == long[: long.index(third)]
        assert engine.stats().total_gen_tokens == 20 + 3 + len(ended) + 1
        assert runner.num_ahead > 15


async def test_a_step_begun_ahead_that_fails_ends_all_streams() -> None:
    runner = pipelined(fail_at_step=5)
    with opened(runner) as engine:
        with pytest.raises(InternalError, match="step 5 was told to fail"):
            await tokens_of(engine.submit(request(1, 2, max_tokens=20)))
        assert not engine.healthy()


async def test_an_engine_that_nobody_asks_has_nothing_under_way() -> None:
    """Not even a step for an answer that has ended by a word."""
    runner = pipelined()
    with opened(runner) as engine:
        end_id = fake_answer((1, 2, 3), 2)[1]
        await tokens_of(engine.submit(request(1, 2, 3, end_id=end_id)))
        assert runner.num_ahead
        assert runner.pending == []
        assert await tokens_of(engine.submit(request(9))) == fake_answer((9,), 5)
