"""A KV block that comes back from a file is what a cold prefill computes, bit for bit, in every cache format. So are a
state and a block of layers with a window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.base import Engine, EngineStats
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.open import open_engine
from llmserve.engine.remote.process import ProcessEngine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument
from tests.checkpoints import make_checkpoint
from tests.contracts.engine_process import COMMAND as PROCESS
from tests.engine.cpu.full_answers import Answer, full_answers

PROMPTS = [tuple((7 * place + shift) % 300 for place in range(40)) for shift in (0, 3)]
OPTIONS = {
    "float32": BuildOptions(dtype="float32"),
    "float16": BuildOptions(dtype="float16", quantization="int8"),
    "int8": BuildOptions(dtype="float16", quantization="int4", kv_cache_dtype="int8"),
}
STATES = {
    "qwen3.5": BuildOptions(dtype="float32"),
    "falcon-h1": BuildOptions(dtype="float16", quantization="int8"),
    "lfm2": BuildOptions(dtype="float32"),
}
WINDOWS = {
    "cohere2": BuildOptions(dtype="float32"),  # two of three layers read 16 tokens
    "gemma3": BuildOptions(dtype="float16", quantization="int8", kv_cache_dtype="int8"),
}
OpenEngine = Callable[[Path, EngineSettings], Engine]


@pytest.fixture(scope="module", params=[*OPTIONS, *STATES, *WINDOWS])
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = str(request.param)
    folder = tmp_path_factory.mktemp(name)
    make_checkpoint(folder / "checkpoint", "llama" if name in OPTIONS else name)
    options = replace((OPTIONS | STATES | WINDOWS)[name], tokens_per_block=8, max_num_tokens=64, max_batch_size=4)
    build_engine(folder / "checkpoint", folder / "engine", options)
    return folder / "engine"


def answers(
    engine_dir: Path, folder: Path | None, open_engine: OpenEngine = open_engine
) -> tuple[list[Answer], list[int], EngineStats]:
    """Also how many tokens of each prompt were found."""
    files = GpuSettings(kv_cache_dir=str(folder)) if folder else GpuSettings()
    engine = open_engine(engine_dir, EngineSettings(max_kv_tokens=56, gpu=files))  # room for one of the prompts
    return *full_answers(engine, (*PROMPTS, *PROMPTS)), engine.stats()


def open_process(path: Path, settings: EngineSettings) -> Engine:
    return ProcessEngine(PROCESS, path, path, settings)


def test_an_engine_in_its_own_process_has_a_folder_too(engine_dir: Path, tmp_path: Path) -> None:
    here, _, _ = answers(engine_dir, tmp_path)
    there, found, _ = answers(engine_dir, tmp_path, open_process)
    assert found == [32] * 4
    assert there == here


def test_answers_are_those_of_a_cold_prefill(engine_dir: Path, tmp_path: Path) -> None:
    cold, found_cold, stats = answers(engine_dir, None)
    assert found_cold == [0] * 4
    assert stats.total_restored_blocks is None
    first, found, _ = answers(engine_dir, tmp_path)
    assert found == [0, 0, 32, 32]
    again, found, stats = answers(engine_dir, tmp_path)
    assert found == [32] * 4
    assert (stats.total_restored_blocks or 0) >= 12  # also before a prompt asks
    assert first == again == cold


def test_blocks_that_cannot_be_are_refused(engine_dir: Path) -> None:
    runner = CpuRunner.open(EngineDirectory.open(engine_dir).engine_file, num_blocks=4, threads=1)
    content = runner.read_block(3)
    assert len(content) == runner.info.block_bytes
    other = (bytes(range(256)) * (len(content) // 256 + 1))[: len(content)]
    runner.write_block(3, other)
    assert runner.read_block(3) == other
    assert runner.read_block(2) == content
    for wrong in (4, 2**31):
        with pytest.raises(InvalidArgument, match=r"block .* of 4"):
            runner.read_block(wrong)
        with pytest.raises(InvalidArgument, match=r"block .* of 4"):
            runner.write_block(wrong, other)
    with pytest.raises(InvalidArgument, match="bytes"):
        runner.write_block(0, other[:-1])
    runner.close()


@pytest.mark.parametrize("engine_dir", STATES, indirect=True)
def test_states_that_cannot_be_are_refused(engine_dir: Path) -> None:
    file = EngineDirectory.open(engine_dir).engine_file
    with closing(CpuRunner.open(file, num_blocks=4, threads=1, num_states=3)) as runner:
        content = runner.read_state(1)
        assert len(content) == runner.info.state_bytes > 0
        other = (bytes(range(256)) * (len(content) // 256 + 1))[: len(content)]
        runner.write_state(2, other)
        assert runner.read_state(2) == other
        assert runner.read_state(1) == content
        for wrong in (3, 2**31):
            with pytest.raises(InvalidArgument, match=r"state .* of 3"):
                runner.read_state(wrong)
            with pytest.raises(InvalidArgument, match=r"state .* of 3"):
                runner.write_state(wrong, other)
        with pytest.raises(InvalidArgument, match="bytes"):
            runner.write_state(0, other[:-1])
