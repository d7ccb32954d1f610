"""`--help`: on a terminal of 80 columns every flag can be read."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llmserve.cli.main import app

COMMANDS: Any = typer.main.get_command(app)


@pytest.mark.parametrize("name", sorted(COMMANDS.commands))
def test_every_flag_is_shown_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [name, "--help"]).output
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("  --")] == []
    assert "…" not in shown
    words = set(re.findall(r"--[a-z0-9-]+", shown))
    flags = {flag for one in COMMANDS.commands[name].params for flag in (*one.opts, *one.secondary_opts)}
    assert {flag for flag in flags if flag.startswith("--")} <= words


def test_flags_are_grouped() -> None:
    shown = CliRunner().invoke(app, ["build", "--help"]).output
    options, _, panel = shown.partition("With --target tensorrt_llm:")
    assert "--max-batch-size" in options
    assert "--max-beam-width" in panel
