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

    command = ["verify", "adapters/style-engine", "--engine", "engine"]
    assert run(command, monkeypatch) == 0
    assert "every file is unchanged; self-test passed: 3 prompts" in capsys.readouterr().out
    assert run([*command, "--output-dir", "other"], monkeypatch) == 2
    assert "--output-dir is for adapter build" in capsys.readouterr().err
    with (found.path / "selftest.npz").open("ab") as file:
        file.write(b"x")
    assert run(command, monkeypatch) == 2
    assert "selftest.npz was changed" in capsys.readouterr().err

    assert run(["build", "engine", "--engine", "engine"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "adapter_config.json is missing" in said
    assert "adapter_model.safetensors is missing" in said
