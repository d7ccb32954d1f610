"""What of the machine's memory the CPU engine's KV pool may have: `engine.kv_pool` says what it makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.cpu import runtime
from llmserve.engine.cpu.runner import read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.settings import EngineSettings
from llmserve.errors import ResourceExhausted
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
    assert runtime.pool_blocks(directory, settings) == wanted
    with pytest.raises(ResourceExhausted, match="belong to the engine beside it"):
        runtime.pool_blocks(directory, replace(settings, reserved_bytes=beside + 1))
