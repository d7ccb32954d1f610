"""Guided answers of the whole engine: they follow their guide however they are drawn, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import FinishReason, GenerateRequest, Guide, SamplingParams, TokenEvent
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.scheduler import Scheduler
from llmserve.scheduler.settings import Policy, SchedulerSettings
from llmserve.stages import guides as guides_module
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import make_checkpoint

END_ID = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "size": {"type": "integer", "minimum": -5, "maximum": 99},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "size", "colour"],
    "additionalProperties": False,
}
WORDS = r"[a-z]{3,9}( [a-z]{3,9}){1,4}\."
TEXTS = {
    "schema": GuideText(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "words": GuideText(GuideKind.REGEX, WORDS),
    "sum": GuideText(GuideKind.EBNF_GRAMMAR, 'root ::= [0-9] (" + " [0-9]){2} ";"'),
}
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=160, temperature=0.0),
    "drawn": SamplingParams(max_tokens=160, temperature=1.5, seed=3),
    "filtered": SamplingParams(max_tokens=160, top_k=5, top_p=0.9, min_p=0.01, seed=4, repetition_penalty=1.2),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(str(request.param))
    make_checkpoint(folder / "checkpoint", str(request.param))
    options = BuildOptions(dtype="float32", tokens_per_block=8, max_num_tokens=64, max_batch_size=16)
    build_engine(folder / "checkpoint", folder / "engine", options)
    return folder / "engine"


@pytest.fixture(scope="module")
def tokenizer(engine_dir: Path) -> Tokenizer:
    return load_tokenizer(engine_dir)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> dict[str, Guide]:
    compiler = GuideCompiler(tokenizer, 320)
    with patch.object(guides_module, "WHITE_SPACE", " ?"):  # a network without training would fill its answers with it
        return {name: compiler.compile(text) for name, text in TEXTS.items()}


def check(name: str, answer: str) -> None:
    if name == "schema":
        jsonschema.validate(json.loads(answer), SCHEMA)
    elif name == "words":
        assert re.fullmatch(WORDS, answer), answer
    else:
        assert re.fullmatch(r"\d \+ \d \+ \d;", answer), answer


def request(guide: Guide, sampling: SamplingParams, prompt: Sequence[int] = (5, 6, 7, 8)) -> GenerateRequest:
    return GenerateRequest("r", tuple(prompt), sampling, end_id=END_ID, guide=guide, return_log_probs=True)


async def events_of(engine: Engine, sent: GenerateRequest) -> list[TokenEvent]:
    async with aclosing(engine.submit(sent)) as stream:
        return [event async for event in stream]


def tokens_of(events: Sequence[TokenEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.sequence_index == index for token in event.token_ids]


async def test_answers_follow_their_guides_and_are_those_of_an_idle_engine(
    engine_dir: Path, tokenizer: Tokenizer, guides: dict[str, Guide]
) -> None:
    """All guides and draws at once, beside an answer without a guide, in a cache so small that some are preempted."""
    jobs = [(name, sampling) for name in guides for sampling in SAMPLINGS]
    sent = [request(guides[name], SAMPLINGS[sampling], (5, 6, 7, place)) for place, (name, sampling) in enumerate(jobs)]
    plain = replace(sent[0], guide=None, end_id=None)
    idle = open_engine(engine_dir)
    alone = [await events_of(idle, each) for each in (*sent, plain)]
    idle.close()
    settings = SchedulerSettings(policy=Policy.MAX_UTILIZATION)
    busy = open_engine(engine_dir, EngineSettings(scheduler=settings, max_kv_tokens=168))
    with patch.object(Scheduler, "_preempt", autospec=True, side_effect=Scheduler._preempt) as preempt:
        together = await asyncio.gather(*(events_of(busy, each) for each in (*sent, plain)))
    busy.close()
    assert preempt.call_count > 0, "nothing was preempted; make the cache smaller"
    for (name, _), found, wanted in zip(jobs, together, alone, strict=False):
        assert tokens_of(found) == tokens_of(wanted)
        assert [p for event in found for p in event.log_probs] == [p for event in wanted for p in event.log_probs]
        assert found[-1].finish_reason is FinishReason.END_ID
        check(name, tokenizer.decode(tokens_of(found)))
    assert tokens_of(together[-1]) == tokens_of(alone[-1])


async def test_each_of_several_answers_follows_the_guide(
    engine_dir: Path, tokenizer: Tokenizer, guides: dict[str, Guide]
) -> None:
    engine = open_engine(engine_dir)
    events = await events_of(engine, replace(request(guides["words"], SAMPLINGS["drawn"]), num_sequences=4))
    engine.close()
    answers = [tokenizer.decode(tokens_of(events, index)) for index in range(4)]
    for answer in answers:
        check("words", answer)
    assert len(set(answers)) == 4


async def test_what_cuts_an_answer_short(engine_dir: Path, guides: dict[str, Guide]) -> None:
    engine = open_engine(engine_dir)
    cut = await events_of(engine, request(guides["schema"], replace(SAMPLINGS["greedy"], max_tokens=5)))
    assert (len(tokens_of(cut)), cut[-1].finish_reason) == (5, FinishReason.LENGTH)
    endless = await events_of(engine, replace(request(guides["sum"], SAMPLINGS["greedy"]), end_id=None))
    assert endless[-1].finish_reason is FinishReason.END_ID
    longer = replace(SAMPLINGS["greedy"], min_tokens=150)  # than the guide allows
    assert (await events_of(engine, request(guides["sum"], longer)))[-1].finish_reason is FinishReason.END_ID
    engine.close()


async def test_log_probs_are_those_of_the_model(engine_dir: Path, guides: dict[str, Guide]) -> None:
    """Not of what the guide leaves: the most likely tokens are what the model would have said."""
    engine = open_engine(engine_dir)
    sent = replace(request(guides["words"], SAMPLINGS["greedy"]), num_top_log_probs=3, return_generation_logits=True)
    events = await events_of(engine, sent)
    engine.close()
    tops = [top for event in events for top in event.top]
    rows = [row for event in events for row in event.logits]
    assert any(token not in top.ids for token, top in zip(tokens_of(events), tops, strict=True))
    for top, row in zip(tops, rows, strict=True):
        assert list(top.ids) == [int(token) for token in np.argsort(-row, kind="stable")[:3]]


async def test_bad_words_give_way_to_the_guide(
    engine_dir: Path, tokenizer: Tokenizer, guides: dict[str, Guide]
) -> None:
    engine = open_engine(engine_dir)
    every = tuple((token,) for token in range(3, 320))
    events = await events_of(engine, replace(request(guides["sum"], SAMPLINGS["drawn"]), bad_ids=every))
    engine.close()
    check("sum", tokenizer.decode(tokens_of(events)))


async def test_the_fake_engine_follows_guides_too(tokenizer: Tokenizer) -> None:
    engine = fake_engine()
    guide = GuideCompiler(tokenizer, engine.info.vocab_size).compile(TEXTS["words"])
    events = await events_of(engine, request(guide, SAMPLINGS["drawn"]))
    engine.close()
    check("words", tokenizer.decode(tokens_of(events)))
