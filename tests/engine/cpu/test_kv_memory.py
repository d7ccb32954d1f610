"""What of the machine's memory the CPU engine's KV pool may have: `engine.kv_pool` says what it makes of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.cpu import runner, runtime
from llmserve.engine.cpu.layout import read_step_bytes
from llmserve.engine.cpu.oversize import left_beside_weights
from llmserve.engine.cpu.runner import read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.settings import EngineSettings
from llmserve.errors import ResourceExhausted
from llmserve.scheduler.settings import SchedulerSettings
from tests.checkpoints import make_checkpoint


def test_weights_activations_and_what_belongs_to_others_are_taken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_engine(make_checkpoint(tmp_path / "c", "llama"), tmp_path / "e", BuildOptions(max_num_tokens=64))
    directory = EngineDirectory.open(tmp_path / "e")
    header = read_header(directory.engine_file)
    block_bytes = header.kv_bytes_per_block
    taken = directory.engine_file.stat().st_size + header.activation_bytes
    wanted, beside = 5, 100 * block_bytes
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: taken + beside + wanted * block_bytes)
    settings = EngineSettings(kv_cache_fraction=1.0, max_kv_tokens=wanted * header.block_size, reserved_bytes=beside)
    assert runtime.pool_sizes(directory, settings) == (wanted, 0)
    with pytest.raises(ResourceExhausted, match="are reserved for the other engine"):
        runtime.pool_sizes(directory, replace(settings, reserved_bytes=beside + 1))


def state_sizes(directory: EngineDirectory) -> tuple[int, int, int]:
    """Bytes of a state and of a block, and how many blocks take as much as a state."""
    header = read_header(directory.engine_file)
    state_bytes, block_bytes = header.state_bytes, header.kv_bytes_per_block
    return state_bytes, block_bytes, -(-state_bytes // block_bytes)


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    path = tmp_path_factory.mktemp("states")
    options = BuildOptions(max_num_tokens=64, max_batch_size=4, tokens_per_block=8)
    build_engine(make_checkpoint(path / "c", "qwen3.5"), path / "e", options)
    return EngineDirectory.open(path / "e")


def test_states_take_memory_of_the_cache(with_states: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each running sequence, and one for as many blocks as take its memory."""
    state_bytes, block_bytes, between = state_sizes(with_states)
    header = read_header(with_states.engine_file)
    taken = with_states.engine_file.stat().st_size + header.activation_bytes
    memory = 4 * state_bytes + 3 * between * block_bytes + 3 * state_bytes
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: taken + memory)
    settings = EngineSettings(kv_cache_fraction=1.0, max_kv_tokens=2 * between * 8)
    assert runtime.pool_sizes(with_states, settings) == (2 * between, 4 + 2)
    alone = replace(settings, scheduler=SchedulerSettings(enable_block_reuse=False))
    assert runtime.pool_sizes(with_states, alone) == (2 * between, 5), "one is left for drafts"
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: taken + 5 * state_bytes)
    num_blocks, num_states = runtime.pool_sizes(with_states, replace(settings, max_kv_tokens=8))
    assert (num_blocks, num_states) == (1, 3), "running sequences leave half of it to blocks, and one for drafts"
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: taken + 2 * state_bytes)
    assert runtime.pool_sizes(with_states, replace(settings, max_kv_tokens=8)) == (1, 1)


def test_a_state_that_does_not_fit_is_refused(with_states: EngineDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    state_bytes, _, _ = state_sizes(with_states)
    header = read_header(with_states.engine_file)
    taken = with_states.engine_file.stat().st_size + header.activation_bytes
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: taken + state_bytes)
    with pytest.raises(ResourceExhausted, match="one sequence's state, which needs"):
        runtime.pool_sizes(with_states, EngineSettings())


@pytest.mark.parametrize(("kind", "part"), [("llama", 1.0), ("olmoe", 0.6)])
def test_an_engine_larger_than_the_memory_runs_with_a_warning(
    kind: str, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights stay in the file. Of a mixture, a token needs the experts that it chooses."""
    options = BuildOptions(max_num_tokens=8, max_seq_len=8, max_batch_size=2, tokens_per_block=4)
    build_engine(make_checkpoint(tmp_path / "c", kind, vocab_size=320), tmp_path / "e", options)
    directory = EngineDirectory.open(tmp_path / "e")
    file_bytes = directory.engine_file.stat().st_size
    of_step = read_step_bytes(directory.engine_file)
    assert 0.5 * part * file_bytes < of_step < part * file_bytes
    for module in (runtime, runner):
        monkeypatch.setattr(module, "available_memory_bytes", lambda: file_bytes * 9 // 10)
    with caplog.at_level(logging.WARNING):
        runtime.RUNTIME.open(directory, EngineSettings()).close()
    assert "the weights (" in caplog.text
    assert "must be read from the disk, again and again" in caplog.text
    assert "tokens/s" in caplog.text
    assert runtime.RUNTIME.problems_here(directory) == []
    monkeypatch.setattr(runtime, "available_memory_bytes", lambda: file_bytes // 100)
    with pytest.raises(ResourceExhausted, match="a KV cache with room for one sequence"):
        runtime.RUNTIME.open(directory, EngineSettings())


def test_weights_give_way_only_where_no_sequence_fits_beside_them() -> None:
    assert left_beside_weights(1000, 700, least=300) == 300
    assert left_beside_weights(1000, 900, least=100) == 100
    assert left_beside_weights(1000, 901, least=100) == 250
    assert left_beside_weights(1000, 700, least=400) == 300, "they are not the reason"
    assert left_beside_weights(1000, 60_000, least=100) == 250
