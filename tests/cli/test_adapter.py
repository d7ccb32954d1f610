"""`llmserve adapter build`: what it writes, and what it says about a folder that it cannot use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.cli.main import main
from llmserve.engine.adapters.sealed import SealedAdapter
from tests.adapters import make_adapter
from tests.checkpoints import make_checkpoint


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["llmserve", "adapter", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_an_adapter_directory_for_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    base = build_engine(checkpoint, tmp_path / "engine", BuildOptions(dtype="float32", max_seq_len=64))
    make_adapter(tmp_path / "style", checkpoint)
    monkeypatch.chdir(tmp_path)
    assert run(["build", "style", "--engine", "engine"], monkeypatch) == 0
    said = capsys.readouterr().out
    found = SealedAdapter.open(Path("adapters/style-engine"))
    assert found.manifest.base_digest == base.engine_digest
    assert f"adapter digest {found.digest}" in said
    assert "rank 4, 14 matrices, float32" in said

    assert run(["build", "engine", "--engine", "engine"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "adapter_config.json is missing" in said
    assert "adapter_model.safetensors is missing" in said
