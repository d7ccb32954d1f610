"""`llmserve run` over an engine whose answers are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llmserve.cli import run
from llmserve.cli.main import main
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.settings import EngineSettings
from tests.stages.conftest import write_baichuan


def open_fake(path: Path, settings: EngineSettings) -> Engine:
    return fake_engine(settings=settings.scheduler, step_delay_s=0.05)


def test_more_prompts_than_a_server_lets_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_baichuan(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n" * 1200)
    monkeypatch.setattr(run, "open_engine", open_fake)
    arguments = ["run", str(tmp_path), "--input-file", str(prompts), "--max-output-len", "1"]
    monkeypatch.setattr(sys, "argv", ["llmserve", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code in (0, None)
    assert "1200 prompts" in capsys.readouterr().out
