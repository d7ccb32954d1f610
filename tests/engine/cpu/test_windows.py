"""Layers with a window give back the blocks that they cannot read any more. Nothing of an answer depends on it."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.cache_layout import CacheLayout, best_split, longest_windows
from llmserve.engine.cpu.layout import read_header
from llmserve.engine.cpu.runner import CpuRunner, cache_reads, layout_of
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.plan import Chunk, StepPlan
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.conftest import NETWORKS, EngineFile
from tests.engine.cpu.law import FORMATS
from tests.engine.cpu.networks import Stepper, all_logits, random_ids

LENGTH = 90
MANUAL = Path(__file__).resolve().parents[3] / "docs" / "models.md"
POISON = 0  # the block that stands where nothing may be read


class Writable(Stepper, Protocol):
    def write_block(self, block: int, content: bytes) -> None: ...


def sliding_logits(runner: Writable, ids: list[int], rng: random.Random, early: int = 0) -> NDArray[np.float32]:
    """In chunks of chance. A block that was given back, perhaps too early, is another's from then on: it is full of
    ones."""
    info = runner.info
    layers, size = info.windowed_layers, info.block_size
    free = list(range(1, info.num_blocks))
    rng.shuffle(free)
    junk = b"\xff" * info.block_bytes
    for block in (POISON, *free):
        runner.write_block(block, junk)
    tables: list[list[int]] = [[] for _ in range(1 + layers.num_tables)]
    found, start = [], 0
    while start < len(ids):
        end = min(len(ids), start + rng.choice([1, 1, 2, 5, 13]))
        for table in tables:
            table += [free.pop() for _ in range(-(-end // size) - len(table))]
        chunk = Chunk(
            0, ids[start:end], start, tables[0][:], return_logits=True, windowed=[table[:] for table in tables[1:]]
        )
        found.append(runner.step(StepPlan((chunk,))).logits[0])
        start = end
        for table in tables[1:]:
            for place in range((layers.first_read(start) + early) // size):
                if table[place] != POISON:
                    runner.write_block(table[place], junk)
                    free.insert(0, table[place])
                    table[place] = POISON
    return np.concatenate(found)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("network", NETWORKS)
def test_logits_are_those_of_a_cache_that_keeps_everything(
    network: str, form: tuple[str, str, str], engine_file: EngineFile
) -> None:
    path = engine_file(network, *form)
    ids = random_ids(83, LENGTH)
    with closing(CpuRunner.open(path, num_blocks=30, threads=1)) as runner:
        assert runner.info.windowed_layers.num_tables == 0
        wanted = all_logits(runner, ids)
    with closing(CpuRunner.open(path, num_blocks=60, threads=2, keeps_all=False)) as runner:
        assert runner.info.windowed_layers.num_tables == (1 if network == "states" else 2)
        found = sliding_logits(runner, ids, random.Random(network))
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def saving(windows: list[int], max_seq_len: int) -> float:
    """How many times as many sequences fit."""
    split = best_split(sorted(min(window or max_seq_len, max_seq_len) for window in windows), max_seq_len, 32)
    now = len(windows) * max_seq_len // 32
    return round(now / (split.num_parts_for(max_seq_len, 32) if split else now), 2)


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gpt-oss-20b and 120b", [128, 0] * 12),
        ("gpt-oss-20b and 120b", [128, 0] * 18),
        ("Gemma 2 9B", [4096, 0] * 21),
        ("Gemma 3 1B", ([*[512] * 5, 0] * 5)[:26]),
        ("Gemma 3 4B", ([*[1024] * 5, 0] * 6)[:34]),
        ("Gemma 3 12B", [*[1024] * 5, 0] * 8),
        ("Gemma 3 27B", ([*[1024] * 5, 0] * 11)[:62]),
        ("EXAONE 4 32B", [4096, 4096, 4096, 0] * 16),
        ("OLMo 3 7B", [4096, 4096, 4096, 0] * 8),
        ("Llama 4 Scout", [8192, 8192, 8192, 0] * 12),
        ("Mistral 7B v0.1", [4096] * 32),
    ],
)
def test_the_manual_says_what_is_saved(name: str, windows: list[int]) -> None:
    [line] = [line for line in MANUAL.read_text().splitlines() if line.startswith(f"| {name} |")]
    for length, written in zip((8192, 32768, 131072), line.strip("| ").split("|")[2:], strict=False):
        if written.strip():
            assert saving(windows, length) == float(written)


def test_layers_that_do_not_divide_evenly_share_one_table() -> None:
    assert best_split([0] * 0, 8192, 32) is None
    assert best_split([8192] * 3, 8192, 32) is None
    assert best_split([1024] * 7 + [8192] * 21, 8192, 32) is None, "a block would be empty to two thirds"
    assert best_split([1024] * 7 + [8192] * 7, 1024, 32) is None, "no window is shorter than a sequence"


def test_a_block_that_is_given_back_too_early_is_seen(engine_file: EngineFile) -> None:
    path = engine_file("rope", *FORMATS[0])
    ids = random_ids(83, LENGTH)
    with closing(CpuRunner.open(path, num_blocks=60, threads=1, keeps_all=False)) as runner:
        right, wrong = (sliding_logits(runner, ids, random.Random(1), early) for early in (0, 4))
    assert not np.array_equal(right, wrong)


FEW = tuple((token, 50.0) for token in (5, 6, 7))  # answers of three tokens repeat themselves, so that drafts are made
BEGINNING = tuple(token % 300 for token in range(7, 7 * 96, 7))
SAMPLING = SamplingParams(max_tokens=48, temperature=0.3, top_k=20, seed=5)
REQUESTS = [
    GenerateRequest(
        f"r{number}", (*BEGINNING[:length], 5, 6, 7, 5, 6, 7, number), SAMPLING, return_log_probs=True,
        num_sequences=1 + number % 2, embedding_bias=FEW,
    )
    for number, length in enumerate((95, 80, 95, 40, 95, 3))
]  # fmt: skip


OPTIONS = BuildOptions(dtype="float32", tokens_per_block=8, max_num_tokens=128, max_batch_size=8, max_seq_len=192)


@pytest.fixture(scope="module", params=[FORMATS[0], FORMATS[4]], ids=["float32", "int8"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    """Two of its three layers read 16 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    dtype, quantization, cache_dtype = request.param
    options = replace(OPTIONS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype)
    build_engine(make_checkpoint(folder / "c", "cohere2"), folder / "e", options)
    return EngineDirectory.open(folder / "e")


def told(engine: InflightEngine) -> tuple[list[object], list[int]]:
    """All that is told of each answer, twice: some at once, and one after another; and tokens that were found."""

    async def answer(request: GenerateRequest) -> tuple[list[object], int]:
        async with aclosing(engine.submit(request)) as events:
            found = [event async for event in events]
        usages = [event.usage for event in found if event.finish_reason and event.usage]
        by_index = sorted(found, key=lambda event: event.sequence_index)
        tokens = [(event.sequence_index, token) for event in by_index for token in event.token_ids]
        log_probs = [log_prob for event in by_index for log_prob in event.log_probs]
        return [tokens, log_probs], usages[0].cached_tokens

    async def every() -> list[tuple[list[object], int]]:
        return [*await asyncio.gather(*map(answer, REQUESTS)), *[await answer(one) for one in REQUESTS]]

    answers = asyncio.run(every())
    return [one for one, _ in answers], [cached for _, cached in answers]


@pytest.mark.usefixtures("rows_are_cheap")
@pytest.mark.parametrize("policy", Policy)
def test_answers_are_those_of_a_cache_that_keeps_everything(windowed: EngineDirectory, policy: Policy) -> None:
    """At once and alone, several of a request, with drafts, prefix hits and preemption."""
    found = []
    settings = SchedulerSettings(policy=policy)
    for keeps_all, num_blocks in ((True, 200), (False, 500), (False, 56)):
        runner = CpuRunner.open(windowed.engine_file, num_blocks=num_blocks, threads=1, keeps_all=keeps_all)
        with closing(InflightEngine(runner, windowed.info(), settings)) as engine:
            answers, cached = told(engine)
            found.append(answers)
            stats = engine.stats()
            assert stats.total_drafted_tokens
            assert stats.used_num_blocks == 0
            if num_blocks == 500:
                assert cached[-6:] == [96, 80, 96, 40, 96, 8], "what was computed before is found"
            if num_blocks == 56 and policy is Policy.MAX_UTILIZATION:
                assert stats.total_preemptions
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("rows_are_cheap")
def test_drafts_of_an_engine_change_nothing(
    windowed: EngineDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers have windows, too, and its pool has room for the same sequences."""
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)  # however long its steps take
    build_engine(make_checkpoint(tmp_path / "c", "cohere2", seed=7), tmp_path / "e", OPTIONS)
    runner = CpuRunner.open(windowed.engine_file, num_blocks=200, threads=1)
    with closing(InflightEngine(runner, windowed.info(), SchedulerSettings(speculation=Speculation.OFF))) as engine:
        plain, _ = told(engine)
    for policy in Policy:
        settings = EngineSettings(
            max_kv_tokens=150, scheduler=SchedulerSettings(policy, speculation=Speculation.DRAFT),
            gpu=GpuSettings(draft_engine=str(tmp_path / "e")),
        )  # fmt: skip
        with closing(open_engine(windowed.path, settings)) as engine:
            assert isinstance(engine, InflightEngine)
            found, _ = told(engine)
            stats, model = engine.stats(), engine._scheduler.speculator.model
        assert found == plain
        assert 0 < (stats.total_accepted_tokens or 0) < (stats.total_drafted_tokens or 0)
        assert (stats.max_num_blocks, stats.used_num_blocks) == (19, 0)
        assert model is not None
        assert (model.pool.num_blocks, model.pool.num_used) == (3 * 19 + 2 * 256 // 8, 0)


def test_the_pool_has_blocks_for_what_the_batch_can_use(windowed: EngineDirectory, tmp_path: Path) -> None:
    header = read_header(windowed.engine_file)
    assert sorted(longest_windows(cache_reads(windowed.engine_file), header.max_seq_len).values()) == [16, 16, 192]
    layout = layout_of(windowed.engine_file, header)
    assert layout.block_bytes * 3 == header.kv_bytes_per_block
    assert sorted(layout.places) == [(0, 0), (1, 0), (2, 0)]
    assert layout_of(windowed.engine_file, header, keeps_all=True) == CacheLayout(header.kv_bytes_per_block)
    of_window, of_sequence = -(-(15 + 64) // 8) + 1, 192 // 8
    for_batch = (8 * (of_sequence + 2 * of_window) + 2 * 128 // 8) // 3  # a block has all layers
    sizes = [
        (EngineSettings(max_kv_tokens=80), 80 // 8),
        (EngineSettings(), for_batch),
        (EngineSettings(gpu=GpuSettings(draft_engine=str(windowed.path))), for_batch),
        (EngineSettings(gpu=GpuSettings(kv_cache_dir=str(tmp_path))), for_batch),
    ]
    for settings, num_blocks in sizes:
        with closing(open_engine(windowed.path, settings)) as engine:
            assert engine.stats().max_num_blocks == num_blocks
