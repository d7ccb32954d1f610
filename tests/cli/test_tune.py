"""`llmserve tune`: an engine that was built on another machine gets this one's timings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.cli.main import main
from llmserve.engine.cpu.tactics import this_machine
from llmserve.engine.directory.artifact import CACHE_FILE, EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.engine.tactics import TacticCache
from tests.checkpoints import make_checkpoint


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "llama")
    build_engine(checkpoint, tmp_path / "engine", BuildOptions(dtype="float32", max_seq_len=64))
    return tmp_path / "engine"


def tune(engine: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["llmserve", "tune", str(engine)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_an_engine_from_elsewhere_gets_timings_of_this_machine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (engine / CACHE_FILE).write_text("{}")
    directory = EngineDirectory.open(engine)
    layers = runtime_for("cpu").tactics(directory).layers
    assert {choice.reason for choices in layers.values() for choice in choices} == {
        "default, not measured on this machine"
    }
    assert tune(engine, monkeypatch) == 0
    assert set(TacticCache.load(engine / CACHE_FILE, this_machine()).microseconds) == set(layers)
    output = capsys.readouterr()
    assert "not measured" not in output.out
    assert "tactics on" in output.out
    assert "time tactics: done" in output.err


def test_a_cache_that_cannot_be_written_is_one_message(
    engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (engine / CACHE_FILE).unlink()
    (engine / CACHE_FILE).mkdir()
    assert tune(engine, monkeypatch) == 2
    assert f"{engine / CACHE_FILE} cannot be written" in capsys.readouterr().err
