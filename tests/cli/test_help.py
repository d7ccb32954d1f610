"""`--help`: on a terminal of 80 columns every flag can be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llmserve.cli.app import app

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


def test_the_help_of_serve_begins_with_ten_options() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    first, _, rest = shown.partition("Most used options:")[2].partition("\n\n")
    assert len(re.findall(r"^  --", first, re.MULTILINE)) == 10
    assert re.findall(r"^(\w[\w' ]*):$", rest, re.MULTILINE)[:3] == ["Options", "Models", "Listening"]


@pytest.mark.parametrize(
    ("command", "written", "near"),
    [
        ("serve", "--prot", "did you mean --http-port or --grpc-port or --metrics-port?"),
        ("serve", "--hots", "did you mean --host?"),
        ("serve", "--htp-port", "did you mean --http-port?"),
        ("serve", "--zzzzqq", "llmserve serve --help lists the options"),
        ("run", "--promt", "llmserve run --help lists the options"),
        ("chat", "--urll", "did you mean --url?"),
    ],
)
def test_a_suggestion_is_near(command: str, written: str, near: str) -> None:
    error = CliRunner().invoke(app, [command, written, "1"]).exception
    assert str(error).endswith(f"no option {written}; {near}")


def test_the_list_of_commands_imports_none_of_them() -> None:
    """It is shown in a tenth of a second; with every command's imports it takes most of a second."""
    program = "import sys; from llmserve.cli.app import app; app(['--help'], standalone_mode=False)"
    command = [sys.executable, "-c", f"{program}; print(*sys.modules)"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(COMMANDS.commands) <= set(shown.split())
    assert {"numpy", "llmserve.cli.build", "llmserve.cli.serve"} & set(shown.split()) == set()


def test_doctor_imports_nothing_that_only_servers_and_builds_need() -> None:
    """Each of these takes a tenth of its time, and so do OpenBLAS's threads."""
    program = "import os, sys; sys.argv = ['llmserve', 'doctor', '--json']; from llmserve.cli.main import main"
    at_exit = "import atexit; atexit.register(lambda: print(os.environ['OPENBLAS_NUM_THREADS'], *sys.modules))"
    command = [sys.executable, "-c", f"{program}; {at_exit}; main()"]
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    num_threads, *modules = shown.splitlines()[-1].split()
    assert num_threads == "1"
    heavy = {"asyncio", "fastapi", "grpc", "torch", "llmserve.models.registry", "llmserve.builder.targets.registry"}
    assert heavy & set(modules) == set()
    assert "llmserve.engine.cuda.runtime" in modules


@pytest.mark.parametrize("name", sorted(COMMANDS.commands))
def test_flags_may_be_written_with_underscores(name: str) -> None:
    takes_value = [
        flag for one in COMMANDS.commands[name].params if not getattr(one, "is_flag", True) for flag in one.opts
    ]
    for flag in [flag for flag in takes_value if "-" in flag.removeprefix("--")][:3]:
        done = CliRunner().invoke(app, [name, "--" + flag.removeprefix("--").replace("-", "_"), "1", "--help"])
        assert done.exit_code == 0, done.output


def test_the_package_can_be_run_as_a_module() -> None:
    shown = subprocess.run([sys.executable, "-m", "llmserve", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == CliRunner().invoke(app, ["--version"]).stdout
