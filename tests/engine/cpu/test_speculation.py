"""Speculation changes no token, log-prob or finish reason, however an answer is drawn and whoever is beside it."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import FinishReason, GenerateRequest, SamplingParams, TopTokens
from llmserve.engine.base import Engine, EngineStats
from llmserve.engine.cpu import runtime
from llmserve.engine.cpu.runner import read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, NotFound
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.drafts.own_text import GRAM
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.stages import guides as guides_module
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint

VOCAB_SIZE = 320
PROMPT = (5, 6, 7, 8, 9, 10, 11, 5, 6, 7, 8, 9, 10, 11, 5, 6, 7)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SAMPLINGS = {
    "greedy": GREEDY,
    "nearly greedy": SamplingParams(max_tokens=40, temperature=0.1, seed=1),
    "drawn": SamplingParams(max_tokens=40, temperature=0.8, top_k=20, top_p=0.9, seed=2),
    "penalties": SamplingParams(max_tokens=40, temperature=0.1, repetition_penalty=1.1, frequency_penalty=0.2, seed=3),
    "min tokens": replace(GREEDY, min_tokens=20),
}
FEW = tuple((token, 50.0) for token in (5, 6, 7))  # answers of three tokens repeat themselves
BANNED = ((5, 6, 7, 5), (7, 7), (6,))
SCHEMA = {
    "type": "object",
    "properties": {"description": {"enum": ["long ago", "of late"]}, "number": {"type": "integer"}},
    "required": ["description", "number"],
    "additionalProperties": False,
}
Answer = tuple[Sequence[int], Sequence[float], Sequence[TopTokens], FinishReason | None]
Drafts = tuple[int, int]  # drafted, accepted
pytestmark = pytest.mark.usefixtures("rows_are_cheap")


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(str(request.param))
    make_checkpoint(folder / "checkpoint", "llama")
    options = BuildOptions(dtype="float32", tokens_per_block=8, max_num_tokens=64, max_batch_size=16)
    if request.param == "int8":
        options = replace(options, dtype="float16", quantization="int8")
    build_engine(folder / "checkpoint", folder / "engine", options)
    return folder / "engine"


async def answer(engine: Engine, request: GenerateRequest, drafts: list[Drafts]) -> Answer:
    async with aclosing(engine.submit(request)) as events:
        told = [event async for event in events]
    if (usage := told[-1].usage) is not None:
        drafts.append((usage.drafted_tokens, usage.accepted_tokens))
    tokens = [token for event in told for token in event.token_ids]
    log_probs = [log_prob for event in told for log_prob in event.log_probs]
    return tokens, log_probs, [top for event in told for top in event.top], told[-1].finish_reason


def lookup_requests() -> dict[str, GenerateRequest]:
    requests = {
        name: GenerateRequest(
            name, PROMPT[: -2 - number] + PROMPT[:GRAM], sampling, end_id=2, stop_ids=((5, 6, 7, 5, 5, 7),),
            embedding_bias=FEW, return_log_probs=True,
            num_top_log_probs=2,
        )
        for number, (name, sampling) in enumerate(SAMPLINGS.items())
    }  # fmt: skip
    return requests | {
        f"bad words, {name}": replace(request, bad_ids=BANNED, embedding_bias=((5, 90.0), (6, 70.0), (7, 80.0)))
        for name, request in requests.items()
    }


def guided_requests(folder: Path) -> dict[str, GenerateRequest]:
    """Of an answer twice as long as its prompt, which repeats what it may begin with."""
    tokenizer = load_tokenizer(folder)
    texts = {
        "schema": GuideText(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        "repeats": GuideText(GuideKind.REGEX, "(the cat sat on the mat\\. |one two three\\. ){3}end"),
    }
    with patch.object(guides_module, "WHITE_SPACE", " ?"):  # a network without training would fill its answers with it
        guides = {name: GuideCompiler(tokenizer, VOCAB_SIZE).compile(text) for name, text in texts.items()}
    prompt = tuple(tokenizer.encode("the cat sat on the mat. the cat sat on the mat. "))
    bad = tuple((token,) for token in tokenizer.encode("cat description"))
    requests = {
        f"{kind}, {name}": GenerateRequest(
            name, prompt, replace(sampling, max_tokens=160), end_id=2, guide=guide, return_log_probs=True,
            num_top_log_probs=2,
        )
        for kind, guide in guides.items()
        for name, sampling in SAMPLINGS.items()
    }  # fmt: skip
    return requests | {f"bad words, {name}": replace(request, bad_ids=bad) for name, request in requests.items()}


def answers(
    folder: Path, speculation: Speculation, requests: Mapping[str, GenerateRequest], draft: Path | None = None
) -> tuple[dict[str, Answer], EngineStats]:
    gpu = GpuSettings(draft_engine=str(draft or ""))
    engine = open_engine(folder, EngineSettings(scheduler=SchedulerSettings(speculation=speculation), gpu=gpu))

    drafts: list[Drafts] = []

    async def asked() -> dict[str, Answer]:
        alone = {f"{name} alone": await answer(engine, request, drafts) for name, request in requests.items()}
        together = await asyncio.gather(*(answer(engine, request, drafts) for request in requests.values()))
        return alone | dict(zip(requests, together, strict=True))

    try:
        found, stats = asyncio.run(asked()), engine.stats()
    finally:
        engine.close()
    totals = tuple(map(sum, zip(*drafts, strict=True)))
    assert totals == (stats.total_drafted_tokens, stats.total_accepted_tokens), "usage says something else"
    return found, stats


@pytest.mark.parametrize(
    ("speculation", "is_guided"),
    [
        *itertools.product((Speculation.LOOKUP, Speculation.GRAMMAR, Speculation.ALL), (False, True)),
        (Speculation.HISTORY, False),
    ],
)
def test_answers_are_those_without_it_in_fewer_steps(
    engine_dir: Path, speculation: Speculation, is_guided: bool
) -> None:
    requests = guided_requests(engine_dir) if is_guided else lookup_requests()
    plain, without = answers(engine_dir, Speculation.OFF, requests)
    found, stats = answers(engine_dir, speculation, requests)
    assert found == plain
    if speculation is Speculation.GRAMMAR and not is_guided:
        assert stats.total_drafted_tokens == 0
        return
    assert stats.total_gen_tokens == without.total_gen_tokens
    assert (without.total_drafted_tokens, without.total_accepted_tokens) == (0, 0)
    assert stats.total_drafted_tokens is not None
    assert 0 < (stats.total_accepted_tokens or 0) <= stats.total_drafted_tokens
    assert stats.iteration < without.iteration


def test_drafts_of_the_client_save_steps(engine_dir: Path) -> None:
    """Of answers that repeat nothing."""
    requests = {name: replace(request, embedding_bias=()) for name, request in lookup_requests().items()}
    plain, without = answers(engine_dir, Speculation.GRAMMAR, requests)
    told = {name: tuple(plain[name][0]) for name in requests}
    drafting = {name: replace(request, draft_ids=told[name]) for name, request in requests.items()}
    found, stats = answers(engine_dir, Speculation.GRAMMAR, drafting)
    assert found == plain
    assert stats.iteration < without.iteration / 2


def test_a_request_may_say_that_nothing_is_drafted(engine_dir: Path) -> None:
    requests = lookup_requests()
    without = {name: replace(request, speculation=False) for name, request in requests.items()}
    plain, none = answers(engine_dir, Speculation.ALL, without)
    assert none.total_drafted_tokens == 0
    found, stats = answers(engine_dir, Speculation.ALL, requests)
    assert found == plain
    assert stats.total_drafted_tokens


@pytest.fixture(scope="module")
def nonsense_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller network with the same tokenizer, and weights that have nothing to do with the other's."""
    return draft_engine(tmp_path_factory.mktemp("nonsense"), num_hidden_layers=1, seed=7)


def draft_engine(folder: Path, kind: str = "llama", seed: int = 7, **overrides: Any) -> Path:
    make_checkpoint(folder / "checkpoint", kind, seed=seed, **overrides)
    options = BuildOptions(dtype="float32", tokens_per_block=16, max_num_tokens=48, max_batch_size=8)
    build_engine(folder / "checkpoint", folder / "engine", options)
    return folder / "engine"


@pytest.mark.parametrize(
    ("speculation", "is_guided"), [(Speculation.DRAFT, False), (Speculation.ALL, True)], ids=["free", "guided"]
)
def test_drafts_of_an_engine_change_nothing_however_wrong(
    engine_dir: Path, nonsense_dir: Path, speculation: Speculation, is_guided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)  # it would soon not be asked any more
    requests = guided_requests(engine_dir) if is_guided else lookup_requests()
    plain, without = answers(engine_dir, Speculation.OFF, requests)
    found, stats = answers(engine_dir, speculation, requests, nonsense_dir)
    assert found == plain
    assert (stats.total_drafted_tokens or 0) > (stats.total_accepted_tokens or 0)
    assert stats.total_gen_tokens == without.total_gen_tokens


def test_drafts_of_an_engine_that_agrees_save_steps(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn or not: both draw with the same numbers."""
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)
    requests = {name: replace(request, embedding_bias=()) for name, request in lookup_requests().items()}
    plain, without = answers(engine_dir, Speculation.OFF, requests)
    found, stats = answers(engine_dir, Speculation.DRAFT, requests, engine_dir)
    assert found == plain
    assert stats.iteration < without.iteration / 2


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_an_engine_that_is_padded_further_drafts(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same tokenizer, 32 rows more; guides have masks of another size there."""
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)
    make_checkpoint(tmp_path / "checkpoint", "llama", seed=7, num_hidden_layers=1, vocab_size=VOCAB_SIZE + 32)
    shutil.copy(engine_dir / "tokenizer.model", tmp_path / "checkpoint" / "tokenizer.model")
    options = BuildOptions(dtype="float32", tokens_per_block=16, max_num_tokens=48, max_batch_size=8)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", options)
    for requests in (lookup_requests(), guided_requests(engine_dir)):
        plain, _ = answers(engine_dir, Speculation.OFF, requests)
        found, stats = answers(engine_dir, Speculation.DRAFT, requests, tmp_path / "engine")
        assert found == plain
        assert stats.total_drafted_tokens


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_an_engine_that_cannot_draft_is_refused(
    engine_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def opened(path: Path, speculation: Speculation = Speculation.ALL) -> None:
        settings = EngineSettings(
            scheduler=SchedulerSettings(speculation=speculation), gpu=GpuSettings(draft_engine=str(path))
        )
        open_engine(engine_dir, settings).close()

    larger = draft_engine(tmp_path / "larger", vocab_size=384)
    digests = [EngineDirectory.open(one).manifest.files["tokenizer.model"].sha256 for one in (larger, engine_dir)]
    with pytest.raises(InvalidArgument, match="its vocabulary has 384 tokens, the engine's has 320") as refused:
        opened(larger)
    assert all(digest in str(refused.value) for digest in digests)
    opened(larger, Speculation.LOOKUP)
    assert "parameter draft_engine" in caplog.text
    with pytest.raises(
        InvalidArgument, match=r"its tokenizer is in tokenizer.json .* the engine's is in tokenizer.mod"
    ):
        opened(draft_engine(tmp_path / "json", "qwen2"))
    with pytest.raises(NotFound, match="no engine directory"):
        opened(tmp_path / "nothing")


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_a_draft_engine_takes_part_of_the_memory(
    engine_dir: Path, nonsense_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, draft = EngineDirectory.open(engine_dir), EngineDirectory.open(nonsense_dir)
    ours, theirs = read_header(directory.engine_file), read_header(draft.engine_file)
    taken = sum(one.engine_file.stat().st_size for one in (directory, draft))
    taken += ours.activation_bytes + theirs.activation_bytes
    block_bytes = ours.kv_bytes_per_block + theirs.kv_bytes_per_block // 2  # their blocks are twice as long
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: taken + 40 * block_bytes)
    settings = EngineSettings(kv_cache_fraction=1.0)
    assert runtime.pool_sizes(directory, settings, draft) == (40, 0)
