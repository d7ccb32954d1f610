"""Log-probs of prompts and the most likely tokens: against numpy's over the engine's own logits, whatever the load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.core import GenerateRequest, PromptScores, SamplingParams, TokenEvent, TopTokens
from llmserve.engine.base import EngineInfo
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.inflight import InflightEngine
from llmserve.evaluation.served.sampling_model import log_softmax
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.engine.cpu.conftest import EngineFile, OpenRunner
from tests.engine.cpu.networks import LIMITS, all_logits, odd_network, random_ids
from tests.engine.cpu.other_process import ISAS

VOCAB = 83
NUM_TOP = 5
INFO = EngineInfo("test", "cpu", "Odd", "float16", "", VOCAB, 96, 8, 96)
PROMPT = tuple(random_ids(VOCAB, 45, 1))


def top_of(logits: NDArray[np.float32], count: int) -> list[int]:
    return [int(token) for token in np.argsort(-logits, kind="stable")[:count]]


def check_top(top: TopTokens, logits: NDArray[np.float32], count: int = NUM_TOP) -> None:
    assert list(top.ids) == top_of(logits, count)
    np.testing.assert_allclose(top.log_probs, log_softmax(logits)[list(top.ids)], atol=1e-5)


def check_prompt(log_probs: Sequence[float], top: Sequence[TopTokens], ids: Sequence[int], logits: object) -> None:
    """`logits` [tokens, vocabulary] of all `ids`."""
    rows = np.asarray(logits)
    assert len(log_probs) == len(top) == len(ids) - 1
    np.testing.assert_allclose(log_probs, [log_softmax(rows[i])[ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-5)
    for place, found in enumerate(top):
        check_top(found, rows[place])


@pytest.mark.parametrize("isa", ISAS)
def test_targets_and_samples_of_a_step(isa: str, engine_file: EngineFile, open_runner: OpenRunner) -> None:
    """More rows than the engine has room for logits of, with and without samples and logits beside them."""
    runner = open_runner(engine_file("rope", "float16", "int8"), isa=isa, threads=2)
    first, second = random_ids(VOCAB, 70, 2), random_ids(VOCAB, 20, 3)
    wanted = [all_logits(runner, ids) for ids in (first, second)]
    greedy = SampleRequest(SamplingParams(temperature=0.0), 0, 20, log_prob=True, num_top=3, logits=True)
    result = runner.step(
        StepPlan(
            (
                Chunk(0, first, 0, list(range(18)), targets=first[1:], num_top=NUM_TOP),
                Chunk(1, second, 0, list(range(20, 25)), greedy, targets=second[1:], num_top=NUM_TOP),
                Chunk(2, [7, 8], 0, [30]),
            )
        )
    )
    assert sorted(result.scores) == [0, 1]
    check_prompt(result.scores[0].log_probs, result.scores[0].top, first, wanted[0])
    check_prompt(result.scores[1].log_probs, result.scores[1].top, second, wanted[1])
    assert result.tokens == [wanted[1][-1].argmax()]
    assert result.log_probs[0] == pytest.approx(log_softmax(wanted[1][-1]).max(), abs=1e-5)
    [sampled_top] = result.scores[1].sampled_top
    check_top(sampled_top, wanted[1][-1], 3)
    assert {index: rows.shape for index, rows in result.logits.items()} == {1: (1, VOCAB)}
    np.testing.assert_array_equal(result.logits[1][0], wanted[1][-1])


def test_neither_chunks_nor_company_change_a_bit(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    runner = open_runner(engine_file("rope", "bfloat16", "int4"), threads=2)
    ids = list(PROMPT)
    table = list(range(12))
    whole = runner.step(StepPlan((Chunk(0, ids, 0, table, targets=ids[1:], num_top=NUM_TOP),))).scores[0]
    parts: list[float] = []
    tops: list[TopTokens] = []
    for begin, end in ((0, 1), (1, 20), (20, 44)):
        other = random_ids(VOCAB, 30, begin)
        company = Chunk(1, other, 0, list(range(20, 28)), targets=other[1:])
        mine = Chunk(0, ids[begin:end], begin, table, targets=ids[begin + 1 : end + 1], num_top=NUM_TOP)
        scores = runner.step(StepPlan((company, mine))).scores[1]
        parts += scores.log_probs
        tops += scores.top
    assert (parts, tops) == (list(whole.log_probs), list(whole.top))


def test_one_sequence_at_a_time_may_have_a_long_prompt(tmp_path: Path, open_runner: OpenRunner) -> None:
    """An engine for one sequence has room for the logits of few rows; the rest comes in further pieces."""
    options = LIMITS.__class__(
        dtype="float32", max_seq_len=96, max_num_tokens=96, max_batch_size=1, tokens_per_block=4, quantization=""
    )
    runner = open_runner(odd_network().compile(tmp_path / "rank0.engine", options))
    ids = random_ids(VOCAB, 90, 4)
    scores = runner.step(StepPlan((Chunk(0, ids, 0, list(range(23)), targets=ids[1:], num_top=NUM_TOP),))).scores[0]
    check_prompt(scores.log_probs, scores.top, ids, all_logits(runner, ids))


def open_engine(path: Path, settings: SchedulerSettings, *, num_blocks: int = 64) -> InflightEngine:
    return InflightEngine(CpuRunner.open(path, num_blocks=num_blocks, threads=2), INFO, settings)


async def events_of(engine: InflightEngine, request: GenerateRequest) -> list[TokenEvent]:
    async with aclosing(engine.submit(request)) as stream:
        return [event async for event in stream]


def request(prompt: Sequence[int] = PROMPT, *, num_sequences: int = 1, **fields: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    return GenerateRequest(
        "r", tuple(prompt), params, num_sequences=num_sequences, return_log_probs=True, num_top_log_probs=NUM_TOP,
        return_prompt_log_probs=True, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def prompt_of(events: Sequence[TokenEvent]) -> PromptScores:
    """Told once, in the first event of sequence 0."""
    first = next(event for event in events if event.sequence_index == 0)
    assert [event for event in events if event.prompt is not None] == [first]
    assert first.prompt is not None
    return first.prompt


def check_answers(events: Sequence[TokenEvent], path: Path, prompt: Sequence[int] = PROMPT) -> None:
    runner = CpuRunner.open(path, num_blocks=64)
    scores = prompt_of(events)
    check_prompt(scores.log_probs, scores.top, prompt, all_logits(runner, list(prompt)))
    for index in {event.sequence_index for event in events}:
        mine = [event for event in events if event.sequence_index == index]
        tokens = [token for event in mine for token in event.token_ids]
        top = [each for event in mine for each in event.top]
        rows = all_logits(runner, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert len(top) == len(rows)
        for found, row in zip(top, rows, strict=True):
            check_top(found, row)
        for found, log_prob, token in zip(top, (p for e in mine for p in e.log_probs), tokens, strict=True):
            assert token not in found.ids or found.log_probs[found.ids.index(token)] == log_prob
    runner.close()


async def test_a_prompt_that_the_cache_knows_is_computed_again(engine_file: EngineFile) -> None:
    path = engine_file("rope", "float16", "")
    engine = open_engine(path, SchedulerSettings())
    plain = GenerateRequest("plain", PROMPT, SamplingParams(max_tokens=1))
    await events_of(engine, plain)
    events = await events_of(engine, request())
    again = await events_of(engine, plain)
    engine.close()
    check_answers(events, path)
    assert events[-1].usage is not None
    assert events[-1].usage.cached_tokens == 0
    assert again[-1].usage is not None
    assert again[-1].usage.cached_tokens > 0


async def test_several_answers_have_one_prompt(engine_file: EngineFile) -> None:
    path = engine_file("rope", "float16", "")
    engine = open_engine(path, SchedulerSettings())
    events = await events_of(engine, request(num_sequences=3))
    engine.close()
    check_answers(events, path)
    cached = {event.sequence_index: event.usage.cached_tokens for event in events if event.usage}
    assert cached[0] == 0
    assert cached[1] == cached[2] == 44


async def test_preemption_changes_nothing(engine_file: EngineFile) -> None:
    path = engine_file("rope", "float16", "")
    prompts = [tuple(random_ids(VOCAB, 30 + i, i)) for i in range(8)]
    idle = open_engine(path, SchedulerSettings(enable_block_reuse=False))
    alone = [await events_of(idle, request(prompt)) for prompt in prompts]
    idle.close()
    busy = open_engine(path, SchedulerSettings(policy=Policy.MAX_UTILIZATION), num_blocks=30)
    with patch.object(Scheduler, "_preempt", autospec=True, side_effect=Scheduler._preempt) as preempt:
        together = await asyncio.gather(*(events_of(busy, request(prompt)) for prompt in prompts))
    busy.close()
    assert preempt.call_count > 0, "nothing was preempted; make the pool smaller"
    for events, wanted in zip(together, alone, strict=True):
        assert prompt_of(events) == prompt_of(wanted)
        assert [top for event in events for top in event.top] == [top for event in wanted for top in event.top]


async def test_logits_of_prompt_and_answer(engine_file: EngineFile) -> None:
    path = engine_file("rope", "float16", "")
    engine = open_engine(path, SchedulerSettings())
    events = await events_of(engine, request(return_context_logits=True, return_generation_logits=True))
    engine.close()
    tokens = [token for event in events for token in event.token_ids]
    runner = CpuRunner.open(path, num_blocks=64)
    wanted = all_logits(runner, [*PROMPT, *tokens])
    runner.close()
    np.testing.assert_array_equal(np.concatenate(prompt_of(events).logits), wanted[: len(PROMPT)])
    rows = [row for event in events for row in event.logits]
    np.testing.assert_array_equal(np.stack(rows), wanted[len(PROMPT) - 1 : -1])
