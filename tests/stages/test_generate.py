from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.core import FinishReason, GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.errors import InvalidArgument
from llmserve.stages.generate import GeneratedEvent, generate
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.stop_strings import find_stop
from llmserve.stages.text import REPLACEMENT
from llmserve.stages.tokenizer import Tokenizer
from tests.stages.conftest import WRITERS
from tests.stages.scripted import ScriptedEngine

REQUEST = GenerateRequest("one", (5, 6, 7), return_log_probs=True)


async def run(
    engine: ScriptedEngine, tokenizer: Tokenizer, *stops: str, request: GenerateRequest = REQUEST
) -> list[GeneratedEvent]:
    return [event async for event in generate(engine, request, tokenizer=tokenizer, stop_strings=stops)]


def joined(tokenizer: Tokenizer, events: list[GeneratedEvent], sequence: int = 0) -> str:
    post = Postprocessor(tokenizer)
    return "".join(post.event_text(event) for event in events if event.tokens.sequence_index == sequence)


def in_ones(ids: list[int]) -> list[list[int]]:
    return [[token] for token in ids]


@pytest.mark.parametrize("kind", [*WRITERS])
@settings(max_examples=60)
@given(data=st.data())
def test_text_ends_before_the_stop_string_however_it_is_tokenised_and_split(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    text = data.draw(st.text("ox runs é\n<>", max_size=25))
    stops = data.draw(st.lists(st.text("ox runs é\n<>", min_size=1, max_size=4), min_size=1, max_size=3))
    ids = tokenizer.encode(text)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=len(ids), max_size=len(ids)))
    portions, start = [], 0
    for size in sizes:
        portions.append(ids[start : start + size])
        start += size
    events = asyncio.run(run(ScriptedEngine(portions), tokenizer, *stops))
    whole = tokenizer.decode(ids)
    cut = find_stop(whole, stops)
    assert joined(tokenizer, events) == whole[:cut]
    assert events[-1].tokens.finish_reason is (FinishReason.LENGTH if cut is None else FinishReason.STOP_WORDS)
    assert all(event.tokens.finish_reason is None for event in events[:-1])


@pytest.mark.parametrize("kind", ["baichuan", "qwen"])
async def test_a_stop_string_closes_the_engines_stream_at_once(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    head = tokenizer.encode("The fox. STOP")
    engine = ScriptedEngine(in_ones(head + tokenizer.encode(" and much more")))
    events = await run(engine, tokenizer, "STOP")
    assert joined(tokenizer, events) == "The fox. "
    assert engine.closed
    assert engine.num_sent == len(head)


async def test_no_character_of_a_stop_string_is_sent_before_it_is_certain(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["qwen"]
    events = await run(ScriptedEngine(in_ones(tokenizer.encode("fox<endless"))), tokenizer, "<end>")
    post = Postprocessor(tokenizer)
    sent = ""
    for event in events:
        sent += post.event_text(event)
        assert not sent.endswith(("<", "<e", "<en", "<end"))
    assert sent == "fox<endless"


async def test_a_cut_inside_a_token_keeps_the_tokens_first_part(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["qwen"]
    ids = tokenizer.encode("The river and")
    last = tokenizer.decode(ids[-1:])
    assert len(last) > 2
    events = await run(ScriptedEngine(in_ones(ids)), tokenizer, last[2:])
    assert joined(tokenizer, events) == "The river and"[: 2 - len(last)]
    assert events[-1].tail_text == last[:2]
    assert events[-1].tokens.usage is not None
    assert events[-1].tokens.usage.completion_tokens == sum(len(event.tokens.token_ids) for event in events)


@pytest.mark.parametrize("kind", [*WRITERS])
@settings(max_examples=60)
@given(data=st.data())
def test_bytes_that_make_no_character_change_nothing_about_where_the_text_ends(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Lone bytes, spread characters and invisible ids between the words."""
    tokenizer = tokenizers_by_kind[kind]
    awkward = [*lone_bytes(tokenizer)[:3], *tokenizer.encode("é汉😀 \n"), 1, *tokenizer.encode("fox runs")]
    ids = data.draw(st.lists(st.sampled_from(awkward), max_size=40))
    stops = data.draw(st.lists(st.text("ox runsé汉😀\n", min_size=1, max_size=4), min_size=1, max_size=3))
    whole = tokenizer.decode(ids)
    events = asyncio.run(run(ScriptedEngine(in_ones(ids)), tokenizer, *stops))
    assert joined(tokenizer, events) == whole[: find_stop(whole, stops)]


@dataclass
class CountingTokenizer:
    """Counts decodes: the work of the generate step."""

    tokenizer: Tokenizer
    num_decodes: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decodes += 1
        return self.tokenizer.decode(ids, skip_special_tokens)

    def decode_stable(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decodes += 1
        return self.tokenizer.decode_stable(ids, skip_special_tokens)


def lone_bytes(tokenizer: Tokenizer) -> list[int]:
    """Ids of bytes that are no character by themselves; none in a vocabulary without bytes."""
    return [token for token in range(tokenizer.vocab_size) if tokenizer.decode([token, token]) == 2 * REPLACEMENT]


@pytest.mark.parametrize("kind", ["baichuan", "llama-slow", "qwen", "llama-fast"])
async def test_an_answer_of_invalid_bytes_costs_a_few_decodes_per_token(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = [*tokenizer.encode("fox "), *lone_bytes(tokenizer)[-1:] * 200]
    counting = CountingTokenizer(tokenizer)
    events = await run(ScriptedEngine(in_ones(ids)), counting, "STOP")  # type: ignore[arg-type]
    assert counting.num_decodes < 20 * len(ids)
    assert joined(tokenizer, events) == tokenizer.decode(ids)
    if kind != "llama-fast":  # whose decoder looks at a whole run of bytes
        assert len(events) > 190


async def test_a_long_stop_string_costs_a_few_decodes_per_token(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["baichuan"]
    text = "The fox runs. " * 30
    ids = tokenizer.encode(text)
    assert len(ids) > 100
    for stop, expected in ((text + "END", text), (text[5:], text[:5])):
        counting = CountingTokenizer(tokenizer)
        events = await run(ScriptedEngine(in_ones(ids)), counting, stop)  # type: ignore[arg-type]
        assert counting.num_decodes < 12 * len(ids)
        assert joined(tokenizer, events) == expected


async def test_usage_is_the_engines_also_where_a_stop_string_ends_the_answer(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_kind["baichuan"]
    before = time.time_ns()
    events = await run(ScriptedEngine(in_ones(tokenizer.encode("The fox. STOP it"))), tokenizer, "STOP")
    assert [event.tokens.usage for event in events[:-1]] == [None] * (len(events) - 1)
    usage = events[-1].tokens.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (3, 2)
    assert usage.completion_tokens == sum(len(event.tokens.token_ids) for event in events)
    assert (usage.arrival_ns, usage.first_scheduled_ns, usage.first_token_ns) == (1, 2, 3)
    assert before <= usage.last_token_ns <= time.time_ns()


async def test_log_probs_go_with_their_tokens(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["baichuan"]
    events = await run(ScriptedEngine(in_ones(tokenizer.encode("a river <en of tears"))), tokenizer, "<end>")
    count = 0
    for event in events:
        count += len(event.tokens.token_ids)
        assert len(event.tokens.log_probs) == len(event.tokens.token_ids)
        assert event.tokens.cum_log_prob == -count


async def test_one_stopped_sequence_leaves_the_others_running(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["baichuan"]
    first, second = tokenizer.encode("red STOP never"), tokenizer.encode("green bird")
    tokens = [TokenEvent((token,), sequence_index=i) for i, ids in ((0, first), (1, second)) for token in ids]
    last = [TokenEvent((), sequence_index=i, finish_reason=FinishReason.END_ID) for i in (0, 1)]
    request = GenerateRequest("two", (5,), num_sequences=2)
    events = await run(ScriptedEngine(events=[*tokens, *last]), tokenizer, "STOP", request=request)
    assert joined(tokenizer, events, 0) == "red "
    assert joined(tokenizer, events, 1) == "green bird"
    finished = [(e.tokens.sequence_index, e.tokens.finish_reason) for e in events if e.tokens.finish_reason]
    assert finished == [(0, FinishReason.STOP_WORDS), (1, FinishReason.END_ID)]


async def test_a_stop_string_cannot_reach_into_the_first_min_tokens(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["qwen"]
    ids = tokenizer.encode("STOP é STOP")
    first = len(tokenizer.encode("STOP"))
    for min_tokens, text in ((0, ""), (1, "STOP é "), (first, "STOP é "), (len(ids), "STOP é STOP")):
        request = GenerateRequest("min", (5,), SamplingParams(max_tokens=40, min_tokens=min_tokens))
        for portions in (in_ones(ids), [ids]):
            events = await run(ScriptedEngine(portions), tokenizer, "STOP", request=request)
            assert joined(tokenizer, events) == text, min_tokens


async def test_without_a_tokenizer_ids_pass_and_stop_strings_are_refused() -> None:
    events = [event async for event in generate(ScriptedEngine([[1], [2, 3]]), REQUEST)]
    assert [event.tokens.token_ids for event in events] == [(1,), (2, 3), ()]
    assert events[-1].window_ids == (1, 2, 3)
    with pytest.raises(InvalidArgument, match="tokenizer_dir"):
        generate(ScriptedEngine(), REQUEST, stop_strings=["x"])


async def test_over_a_real_scheduler() -> None:
    engine = fake_engine()
    try:
        request = GenerateRequest("real", (1, 2, 3), SamplingParams(max_tokens=6, temperature=0.0))
        events = [event async for event in generate(engine, request)]
        assert [t for event in events for t in event.tokens.token_ids] == fake_answer((1, 2, 3), 6)
        with pytest.raises(InvalidArgument, match="empty"):
            generate(engine, GenerateRequest("none", ()))
    finally:
        engine.close()
