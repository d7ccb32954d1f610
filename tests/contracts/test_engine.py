"""What every `Engine` promises, whatever is inside. Nothing here knows which tokens an engine answers with."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from llmserve.core import FinishReason, GenerateRequest, PromptScores, SamplingParams, TokenEvent
from llmserve.engine.base import Engine
from llmserve.errors import InvalidArgument, Unavailable, Unsupported
from tests.contracts.engines import ENGINES, INSTALLED, INTERPRETED
from tests.contracts.guides import Evens

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
PROMPT = (11, 12, 13, 14, 15, 16, 17)
REQUEST = GenerateRequest("contract", PROMPT, GREEDY)
STATISTICS_S = 0.6  # so late may an engine say what it has done: some are asked for it now and then


@pytest.fixture(name="name", scope="module", params=sorted(ENGINES.keys() - set(INTERPRETED)))
def _name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for the module: no test may leave a trace that another one sees."""
    opened = ENGINES[name](tmp_path_factory)
    yield opened
    assert opened.healthy()
    opened.close()


@pytest.fixture
def own_engine(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """For tests that close it."""
    opened = ENGINES[name](tmp_path_factory)
    yield opened
    opened.close()


async def events_of(engine: Engine, request: GenerateRequest) -> list[TokenEvent]:
    async with aclosing(engine.submit(request)) as stream:
        return [event async for event in stream]


async def answer_of(engine: Engine, request: GenerateRequest, index: int = 0) -> list[int]:
    events = await events_of(engine, request)
    return [token for event in events if event.sequence_index == index for token in event.token_ids]


async def until_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while engine.stats().num_active_requests or engine.stats().used_num_blocks:
        assert time.monotonic() < deadline, f"blocks are not freed: {engine.stats()}"
        await asyncio.sleep(0.002)


async def settled_iteration(engine: Engine) -> int:
    """The number of steps so far, when it does not grow any more: statistics may come late."""
    await until_idle(engine)
    before, now = -1, engine.stats().iteration
    while now != before:
        await asyncio.sleep(STATISTICS_S)
        before, now = now, engine.stats().iteration
    return now


async def test_an_answer_has_max_tokens_tokens_and_one_last_event(engine: Engine) -> None:
    events = await events_of(engine, REQUEST)
    tokens = [token for event in events for token in event.token_ids]
    assert len(tokens) == 12
    assert all(0 <= token < engine.info.vocab_size for token in tokens)
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is FinishReason.LENGTH
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 12)
    assert 0 < usage.arrival_ns <= usage.first_scheduled_ns <= usage.first_token_ns <= usage.last_token_ns


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
async def test_the_same_request_has_the_same_answer_in_any_company(
    engine: Engine, name: str, sampling: SamplingParams
) -> None:
    if name == INSTALLED:
        pytest.skip("TensorRT-LLM does not promise the same bits in any company")
    requests = [
        replace(REQUEST, sampling=replace(sampling, seed=number), prompt_ids=(*PROMPT[number % 5 :], number))
        for number in range(6 if name in INTERPRETED else 24)
    ]
    alone = [await answer_of(engine, request) for request in requests]
    together = await asyncio.gather(*(answer_of(engine, request) for request in reversed(requests)))
    assert list(reversed(together)) == alone
    assert len({tuple(answer) for answer in alone}) > 1


async def test_the_answer_ends_before_the_end_token(engine: Engine) -> None:
    full = await answer_of(engine, REQUEST)
    end_id = full[5]
    events = await events_of(engine, replace(REQUEST, end_id=end_id))
    assert [token for event in events for token in event.token_ids] == full[: full.index(end_id)]
    assert events[-1].finish_reason is FinishReason.END_ID


async def test_the_answer_ends_before_a_stop_word(engine: Engine) -> None:
    full = await answer_of(engine, REQUEST)
    word = tuple(full[4:7])
    first = next(start for start in range(12) if tuple(full[start : start + 3]) == word)
    events = await events_of(engine, replace(REQUEST, stop_ids=(word,)))
    assert [token for event in events for token in event.token_ids] == full[:first]
    assert events[-1].finish_reason is FinishReason.STOP_WORDS


async def test_min_tokens_keeps_the_end_token_away(engine: Engine) -> None:
    full = await answer_of(engine, REQUEST)
    request = replace(REQUEST, end_id=full[0], sampling=replace(GREEDY, min_tokens=4))
    answer = await answer_of(engine, request)
    assert len(answer) >= 4
    assert full[0] not in answer


async def test_a_bad_word_does_not_appear(engine: Engine) -> None:
    full = await answer_of(engine, REQUEST)
    answer = await answer_of(engine, replace(REQUEST, bad_ids=((full[0],), tuple(full[1:3]))))
    assert full[0] not in answer
    assert (full[1], full[2]) not in itertools.pairwise(answer)


async def test_drafts_of_the_client_change_nothing(engine: Engine) -> None:
    full = tuple(await answer_of(engine, REQUEST))
    for draft in (full, (*full[:5], 0, *full[5:]), (0,) * 20, full[6:]):
        assert await answer_of(engine, replace(REQUEST, draft_ids=draft)) == list(full)


async def test_a_request_may_say_that_nothing_is_drafted(engine: Engine) -> None:
    """An answer that repeats itself, with a guide, bad words and `min_tokens` and without."""
    repeats = replace(REQUEST, prompt_ids=(6, 8, 10) * 4, sampling=replace(GREEDY, max_tokens=24), end_id=8)
    biased = replace(repeats, embedding_bias=((6, 1e6), (8, 2e6)))
    asked = [repeats, biased, replace(biased, sampling=replace(biased.sampling, min_tokens=20), bad_ids=((6, 6, 6),))]
    if engine.info.target != "tensorrt_llm":
        asked.append(replace(biased, guide=Evens(engine.info.vocab_size)))
    for request in asked:
        events = await events_of(engine, replace(request, speculation=False))
        usage = events[-1].usage
        assert usage is not None
        assert (usage.drafted_tokens, usage.accepted_tokens) == (0, 0)
        assert await answer_of(engine, request) == [token for event in events for token in event.token_ids]


async def test_a_large_bias_decides(engine: Engine) -> None:
    assert await answer_of(engine, replace(REQUEST, embedding_bias=((42, 1e6),))) == [42] * 12


async def test_the_seed_decides_the_draw(engine: Engine) -> None:
    request = replace(REQUEST, sampling=RANDOM)
    first = await answer_of(engine, request)
    assert await answer_of(engine, request) == first
    others = [await answer_of(engine, replace(request, sampling=replace(RANDOM, seed=seed))) for seed in range(4)]
    assert any(other != first for other in others)


async def test_n_answers_come_in_one_stream(engine: Engine) -> None:
    request = replace(REQUEST, sampling=RANDOM)
    events = await events_of(engine, replace(request, num_sequences=4))
    assert sorted(event.sequence_index for event in events if event.finish_reason) == [0, 1, 2, 3]
    answers = [
        [token for event in events if event.sequence_index == index for token in event.token_ids] for index in range(4)
    ]
    assert all(len(answer) == 12 for answer in answers)
    assert answers[0] == await answer_of(engine, request)
    assert len({tuple(answer) for answer in answers}) > 1


async def test_log_probs_come_one_per_token(engine: Engine) -> None:
    events = await events_of(engine, replace(REQUEST, return_log_probs=True))
    log_probs = [log_prob for event in events for log_prob in event.log_probs]
    assert [len(event.log_probs) for event in events] == [len(event.token_ids) for event in events]
    assert all(math.isfinite(log_prob) and log_prob <= 0 for log_prob in log_probs)
    assert events[-1].cum_log_prob == pytest.approx(sum(log_probs))
    assert all(not event.log_probs for event in await events_of(engine, REQUEST))


async def test_an_event_may_tell_several_tokens_and_all_of_each(engine: Engine) -> None:
    """Held back, since they begin a stop word, and told together when another token follows."""
    asked = replace(REQUEST, return_log_probs=True)
    if engine.info.target != "tensorrt_llm":
        asked = replace(asked, num_top_log_probs=2, return_generation_logits=True)
    alone = await events_of(engine, asked)
    full = [token for event in alone for token in event.token_ids]
    word = (full[3], full[4], next(token for token in range(13) if token not in full))
    events = await events_of(engine, replace(asked, stop_ids=(word,)))
    assert max(len(event.token_ids) for event in events) >= 3
    assert all(len(event.log_probs) == len(event.token_ids) for event in events)
    assert told(events) == told(alone)


def told(events: list[TokenEvent]) -> tuple[list[object], ...]:
    """Each token, and what belongs to it."""
    names = ("token_ids", "log_probs", "top", "logits")
    *lists, logits = ([each for event in events for each in getattr(event, name)] for name in names)
    return (*lists, [row.tobytes() for row in logits])


ASKED = ("return_prompt_log_probs", "num_top_log_probs", "return_context_logits", "return_generation_logits")


@pytest.mark.parametrize("name_of_wish", ASKED)
async def test_what_is_asked_about_the_distribution_is_told_or_refused_by_name(
    engine: Engine, name_of_wish: str
) -> None:
    asked = replace(REQUEST, **{name_of_wish: 3 if name_of_wish == "num_top_log_probs" else True})  # type: ignore[arg-type]
    if engine.info.target == "tensorrt_llm":
        with pytest.raises(Unsupported, match=name_of_wish):
            engine.submit(asked)
        return
    events = await events_of(engine, asked)
    top = [(len(each.ids), len(each.log_probs)) for event in events for each in event.top]
    rows = [row.shape for event in events for row in event.logits]
    prompt = events[0].prompt or PromptScores()
    found = (len(prompt.log_probs), len(top), sum(len(piece) for piece in prompt.logits), len(rows))
    full = (len(PROMPT) - 1, 12, len(PROMPT), 12)
    assert found == tuple(count if name_of_wish == asking else 0 for asking, count in zip(ASKED, full, strict=True))
    assert set(top) <= {(3, 3)}
    assert set(rows) <= {(engine.info.vocab_size,)}


async def test_an_answer_follows_its_guide_or_the_guide_is_refused_by_name(engine: Engine) -> None:
    asked = replace(REQUEST, guide=Evens(engine.info.vocab_size), sampling=RANDOM, num_sequences=2)
    if engine.info.target == "tensorrt_llm":
        with pytest.raises(Unsupported, match="guided_decoding_guide"):
            engine.submit(asked)
        return
    events = await events_of(engine, asked)
    for index in range(2):
        mine = [event for event in events if event.sequence_index == index]
        tokens = [token for event in mine for token in event.token_ids]
        assert (len(tokens), mine[-1].finish_reason) == (5, FinishReason.END_ID)
        assert all(token % 2 == 0 for token in tokens)


async def test_the_answer_ends_where_max_seq_len_ends(engine: Engine) -> None:
    limit = engine.info.max_seq_len
    prompt = tuple(number % 50 for number in range(limit - 3))
    events = await events_of(engine, replace(REQUEST, prompt_ids=prompt))
    assert sum(len(event.token_ids) for event in events) == 3
    assert events[-1].finish_reason is FinishReason.LENGTH


def invalid_requests(engine: Engine) -> dict[str, GenerateRequest]:
    vocab_size = engine.info.vocab_size
    return {
        "prompt is empty": replace(REQUEST, prompt_ids=()),
        "at most": replace(REQUEST, prompt_ids=(1,) * engine.info.max_seq_len),
        "prompt_ids has 2 ids outside": replace(REQUEST, prompt_ids=(1, -1, vocab_size)),
        "max_tokens": replace(REQUEST, sampling=replace(GREEDY, max_tokens=0)),
        "temperature": replace(REQUEST, sampling=replace(GREEDY, temperature=math.nan)),
        "min_tokens": replace(REQUEST, sampling=replace(GREEDY, min_tokens=13)),
        "num_sequences": replace(REQUEST, num_sequences=0),
        "stop_ids has an empty word": replace(REQUEST, stop_ids=((),)),
        "stop_ids has 1 ids outside": replace(REQUEST, stop_ids=((vocab_size,),)),
        "draft_ids has 2 ids outside": replace(REQUEST, draft_ids=(1, -1, vocab_size)),
        "draft_ids has .* tokens": replace(REQUEST, draft_ids=(1,) * (engine.info.max_seq_len + 1)),
        "bad_ids has 1 ids outside": replace(REQUEST, bad_ids=((-5,),)),
        "embedding_bias has 1 ids outside": replace(REQUEST, embedding_bias=((vocab_size, 1.0),)),
        "not a finite number": replace(REQUEST, embedding_bias=((1, math.inf),)),
    }


async def test_an_invalid_request_is_refused_at_once_and_says_why(engine: Engine) -> None:
    for words, request in invalid_requests(engine).items():
        with pytest.raises(InvalidArgument, match=words):
            engine.submit(request)
    assert len(await answer_of(engine, REQUEST)) == 12


async def test_all_problems_are_listed_together(engine: Engine) -> None:
    request = GenerateRequest("many", (), SamplingParams(max_tokens=0, top_p=2.0), stop_ids=((),), num_sequences=0)
    with pytest.raises(InvalidArgument, match=r"(?s)5 problems.*empty.*max_tokens.*top_p.*num_sequences.*stop_ids"):
        engine.submit(request)


async def test_nothing_is_enqueued_before_the_first_pull(engine: Engine) -> None:
    iteration = await settled_iteration(engine)
    stream = engine.submit(REQUEST)
    await asyncio.sleep(0.02)
    assert engine.stats().iteration == iteration
    await stream.aclose()


async def test_closing_a_stream_frees_its_blocks(engine: Engine) -> None:
    request = replace(REQUEST, sampling=replace(GREEDY, max_tokens=engine.info.max_seq_len))
    stream = engine.submit(request)
    await anext(stream)
    await stream.aclose()
    await until_idle(engine)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_deadline_that_has_passed_ends_the_stream(engine: Engine) -> None:
    events = await events_of(engine, replace(REQUEST, deadline=time.monotonic() - 1.0))
    assert [event.finish_reason for event in events] == [FinishReason.TIMED_OUT]


async def test_closing_the_engine_ends_open_streams(own_engine: Engine) -> None:
    request = replace(REQUEST, sampling=replace(GREEDY, max_tokens=own_engine.info.max_seq_len))
    streams = [own_engine.submit(request) for _ in range(3)]
    waiting = own_engine.submit(request)
    for stream in streams:
        await anext(stream)
    await asyncio.to_thread(own_engine.close)
    assert not own_engine.healthy()
    for stream in streams:
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
    with pytest.raises(Unavailable):
        await anext(waiting)
    with pytest.raises(Unavailable):
        own_engine.submit(request)
    own_engine.close()


async def test_an_adapter_that_it_does_not_have_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(replace(REQUEST, adapter="a" * 64))
