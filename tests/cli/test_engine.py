"""The flags of `llmserve engine` and what they mean to the engine."""

from __future__ import annotations

import socket as sockets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmserve.cli import engine
from llmserve.cli.app import app
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.settings import AdapterLimits, EngineSettings


def settings_of(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> tuple[EngineSettings, float]:
    found: list[tuple[EngineSettings, float]] = []

    async def serve(path: Path, socket: Path, settings: EngineSettings, drain_s: float) -> int:
        found.append((settings, drain_s))
        return 0

    monkeypatch.setattr(engine, "_serve", serve)
    done = CliRunner().invoke(app, ["engine", "ENGINE", "--socket", str(folder / "engine.sock"), *flags])
    assert done.exit_code == 0, done.output
    return found[0]


def test_limits_of_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, drain_s = settings_of(monkeypatch, tmp_path)
    assert (settings.adapter_limits, drain_s) == (AdapterLimits(64, 0), 30)
    flags = ("--max-adapters", "3", "--adapter-memory", "1000", "--drain-seconds", "2")
    settings, drain_s = settings_of(monkeypatch, tmp_path, *flags)
    assert (settings.adapter_limits, drain_s) == (AdapterLimits(3, 1000), 2)


def test_of_two_that_start_at_once_the_second_leaves_the_socket_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "engine.sock"
    with sockets.socket(sockets.AF_UNIX) as first:

        def open_meanwhile(directory: Path, settings: EngineSettings) -> Engine:
            first.bind(str(path))
            first.listen()
            return fake_engine()

        monkeypatch.setattr("llmserve.engine.open.open_engine", open_meanwhile)
        done = CliRunner().invoke(app, ["engine", str(tmp_path), "--socket", str(path)])
        assert "an engine already listens at" in str(done.exception)
        with sockets.socket(sockets.AF_UNIX) as client:
            client.connect(str(path))
