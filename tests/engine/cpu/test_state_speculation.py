"""Speculation changes no token, log-prob or finish reason of networks with states, whichever kind of state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import GenerateRequest, SamplingParams, TokenEvent
from llmserve.engine.base import Engine, EngineStats
from llmserve.engine.open import open_engine
from llmserve.engine.remote.process import ProcessEngine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Draftable, Speculation
from llmserve.scheduler.drafts.lookup import LookupDrafter
from llmserve.scheduler.drafts.model_drafter import ModelDrafter
from llmserve.scheduler.settings import Policy, SchedulerSettings
from llmserve.stages import guides as guides_module
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.contracts.engine_process import COMMAND as PROCESS

NETWORKS = {
    "qwen3.5": BuildOptions(dtype="float32"),  # delta nets
    "lfm2": BuildOptions(dtype="float16", quantization="int8"),  # short convolutions
    "falcon-h1": BuildOptions(dtype="float32", kv_cache_dtype="int8"),  # Mamba2
    "qwen2": BuildOptions(dtype="float32"),  # none
}
PROMPT = (5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
DRAWN = SamplingParams(max_tokens=40, temperature=0.8, top_k=20, seed=2)
FEW = tuple((token, 50.0) for token in (5, 6, 7))  # answers of three tokens repeat themselves
SCHEMA = {
    "type": "object",
    "properties": {"description": {"enum": ["long ago", "of late"]}, "number": {"type": "integer"}},
    "required": ["description", "number"],
    "additionalProperties": False,
}
Answers = Mapping[str, list[tuple[object, ...]]]


pytestmark = pytest.mark.usefixtures("rows_are_cheap")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of each kind one. All have the same tokenizer."""

    @cache
    def built(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        make_checkpoint(folder / "checkpoint", kind)
        options = replace(NETWORKS[kind], tokens_per_block=8, max_num_tokens=64, max_batch_size=8)
        build_engine(folder / "checkpoint", folder / "engine", options)
        return folder / "engine"

    return built


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2", "falcon-h1"])
def engine_dir(request: pytest.FixtureRequest, engines: Callable[[str], Path]) -> Path:
    return engines(str(request.param))


def requests_of(folder: Path) -> dict[str, GenerateRequest]:
    tokenizer = load_tokenizer(folder)
    vocab_size = json.loads((folder.parent / "checkpoint" / "config.json").read_text())["vocab_size"]
    with patch.object(guides_module, "WHITE_SPACE", " ?"):  # a network without training would fill its answers with it
        guide = GuideCompiler(tokenizer, vocab_size).compile(GuideText(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    few = GenerateRequest("few", PROMPT, GREEDY, embedding_bias=FEW, return_log_probs=True, num_top_log_probs=2)
    return {
        "few": few,
        "stops": replace(few, stop_ids=((5, 5), (7, 6)), sampling=replace(GREEDY, temperature=0.1, min_tokens=9)),
        "bad": replace(few, bad_ids=((5, 6, 7, 5), (7, 7))),
        "drawn": replace(few, sampling=DRAWN, embedding_bias=(), draft_ids=PROMPT * 3),
        "penalties": replace(few, sampling=replace(DRAWN, repetition_penalty=1.1, frequency_penalty=0.2)),
        "n": replace(few, sampling=replace(DRAWN, temperature=0.1), num_sequences=3),
        "guided": replace(few, guide=guide, embedding_bias=(), sampling=replace(GREEDY, max_tokens=80)),
        "scored": replace(few, return_prompt_log_probs=True, prompt_ids=PROMPT[2:]),
        "shared": replace(few, prompt_ids=PROMPT[:9] + (3,) * 9),
    }


async def told(engine: Engine, request: GenerateRequest) -> list[tuple[object, ...]]:
    """Of each answer: tokens, log-probs, the most likely ones, how it has ended."""
    async with aclosing(engine.submit(request)) as stream:
        events = [event async for event in stream]
    return [of_sequence([one for one in events if one.sequence_index == n]) for n in range(request.num_sequences)]


def of_sequence(events: Sequence[TokenEvent]) -> tuple[object, ...]:
    prompt = [list(event.prompt.log_probs) for event in events if event.prompt is not None]
    pairs = [pair for event in events for pair in zip(event.token_ids, event.log_probs, strict=True)]
    return pairs, [top for event in events for top in event.top], prompt, events[-1].finish_reason


def answers(engine: Engine, requests: Mapping[str, GenerateRequest]) -> tuple[Answers, EngineStats]:
    """One after the other, and all at once."""

    async def asked() -> Answers:
        alone = {f"{name} alone": await told(engine, request) for name, request in requests.items()}
        together = await asyncio.gather(*(told(engine, request) for request in requests.values()))
        return alone | dict(zip(requests, together, strict=True))

    with closing(engine):
        found = asyncio.run(asked())
        return found, engine.stats()


def settings_of(speculation: Speculation, draft: Path | None = None) -> EngineSettings:
    """With so few blocks that some give way to others."""
    scheduler = SchedulerSettings(speculation=speculation, policy=Policy.MAX_UTILIZATION)
    return EngineSettings(max_kv_tokens=280, scheduler=scheduler, gpu=GpuSettings(draft_engine=str(draft or "")))


@pytest.fixture(scope="module")
def plain(engine_dir: Path) -> tuple[Answers, EngineStats]:
    return answers(open_engine(engine_dir, settings_of(Speculation.OFF)), requests_of(engine_dir))


def test_answers_are_those_without_it_in_fewer_steps(engine_dir: Path, plain: tuple[Answers, EngineStats]) -> None:
    wanted, without = plain
    found, stats = answers(open_engine(engine_dir, settings_of(Speculation.ALL)), requests_of(engine_dir))
    assert found == wanted
    assert 0 < (stats.total_accepted_tokens or 0) < (stats.total_drafted_tokens or 0)
    assert stats.iteration < without.iteration
    assert stats.total_gen_tokens == without.total_gen_tokens
    assert stats.free_num_states == stats.max_num_states


def test_nonsense_changes_nothing(
    engine_dir: Path, plain: tuple[Answers, EngineStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of every answer has drafts, right for a while at best."""

    def propose(drafter: LookupDrafter, sequence: Draftable, threshold: float) -> list[int]:
        place = len(sequence.token_ids)
        return [sequence.token_ids[-7 + n % 7] if n < place % 5 else (place + 3 * n) % 12 for n in range(place % 16)]

    monkeypatch.setattr(LookupDrafter, "propose", propose)
    found, stats = answers(open_engine(engine_dir, settings_of(Speculation.LOOKUP)), requests_of(engine_dir))
    assert found == plain[0]
    assert (stats.total_drafted_tokens or 0) > 2 * (stats.total_accepted_tokens or 0) > 0


@pytest.mark.parametrize(("large", "small"), [("lfm2", "falcon-h1"), ("qwen3.5", "qwen2"), ("qwen2", "qwen3.5")])
def test_drafts_of_an_engine_that_knows_nothing_change_nothing(
    large: str, small: str, engines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With states here, there, or in both."""
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)
    monkeypatch.setattr(ModelDrafter, "goes_on", lambda drafter, threshold: len(drafter.drafted) < 4)
    requests = requests_of(engines(large))
    wanted, _ = answers(open_engine(engines(large), settings_of(Speculation.OFF)), requests)
    found, stats = answers(open_engine(engines(large), settings_of(Speculation.ALL, engines(small))), requests)
    assert found == wanted
    assert (stats.total_drafted_tokens or 0) > 2 * (stats.total_accepted_tokens or 0) > 0


def test_drafts_of_an_engine_that_agrees_save_steps(
    engine_dir: Path, plain: tuple[Answers, EngineStats], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)
    monkeypatch.setattr(ModelDrafter, "goes_on", lambda drafter, threshold: len(drafter.drafted) < 4)
    found, stats = answers(open_engine(engine_dir, settings_of(Speculation.DRAFT, engine_dir)), requests_of(engine_dir))
    assert found == plain[0]
    assert stats.iteration < plain[1].iteration / 2
    assert (stats.total_accepted_tokens or 0) > 0.9 * (stats.total_drafted_tokens or 0)  # it knows no bad words


@pytest.mark.parametrize("engine_dir", ["qwen3.5"], indirect=True)
def test_a_process_of_its_own_gives_the_same(engine_dir: Path, plain: tuple[Answers, EngineStats]) -> None:
    """Its steps are timed, and a busy machine makes rows expensive: what a client sends is drafted all the same."""
    [(tokens, *_)] = plain[0]["few alone"]
    request = replace(requests_of(engine_dir)["few"], draft_ids=tuple(token for token, _ in tokens))  # type: ignore[attr-defined]

    async def asked(engine: Engine) -> list[TokenEvent]:
        async with aclosing(engine.submit(request)) as stream:
            return [event async for event in stream]

    with closing(ProcessEngine(PROCESS, engine_dir, engine_dir, settings_of(Speculation.ALL))) as engine:
        events = asyncio.run(asked(engine))
    assert [of_sequence(events)] == plain[0]["few alone"]
    usage = events[-1].usage
    assert usage is not None
    assert usage.accepted_tokens > 0
