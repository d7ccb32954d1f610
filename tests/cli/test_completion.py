"""`llmserve completion`: what real shells offer with these scripts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llmserve.cli.app import app

COMMANDS: Any = typer.main.get_command(app)


def script(shell: str) -> str:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0, done.output
    return done.output


def offered_by_bash(words: list[str], folder: Path) -> list[str]:
    """For the last of `words`, by the function that the script has registered."""
    asked = f"""
        {script("bash")}
        compopt() {{ :; }}  # is for a real press of Tab only
        [[ $(complete -p llmserve) == "complete -F _llmserve llmserve" ]] || exit 3
        COMP_WORDS=({shlex.join(["llmserve", *words])}); COMP_CWORD={len(words)}
        _llmserve
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], cwd=folder, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    return [line for line in done.stdout.split("\n") if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["be"], ["bench"]),
        (["--ver"], ["--version"]),
        (["bench", "--proto"], ["--protocol"]),
        (["bench", "--protocol", ""], ["chat", "completions", "grpc"]),
        (["bench", "--protocol", "=", "g"], ["grpc"]),
        (["bench", "--protocol", "="], ["chat", "completions", "grpc"]),
        (["bench", "--rate", ""], []),
        (["bench", "--json", "en"], ["engine"]),
        (["build", "--dtype", "b"], ["bfloat16"]),
        (["serve", "--model-control-mode", "p"], ["poll"]),
        (["serve", "en"], ["engine"]),
        (["serve", "--http-port", "80", "en"], ["engine"]),
        (["--help", "serv"], ["serve"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["chat", "en"], ["engine"]),
        (["bench", "en"], []),
        (["nothing", "--x"], []),
    ],
)
def test_bash(words: list[str], found: list[str], tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    assert offered_by_bash(words, tmp_path) == found


def test_bash_offers_every_command_and_every_flag(tmp_path: Path) -> None:
    assert set(COMMANDS.commands) <= set(offered_by_bash([""], tmp_path))
    for name, command in COMMANDS.commands.items():
        flags = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("--")}
        assert set(offered_by_bash([name, "--"], tmp_path)) == {*flags, "--help"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    (tmp_path / "_llmserve").write_text(script("zsh"))
    subprocess.run(["zsh", "-n", tmp_path / "_llmserve"], check=True, timeout=30)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "found"),
    [("llmserve be", ["bench"]), ("llmserve bench --protocol ", ["chat", "completions", "grpc"])],
)
def test_fish(line: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "x.fish").write_text(script("fish"))
    asked = f"source {tmp_path / 'x.fish'}; complete -C {shlex.quote(line)}"
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, timeout=30, check=True)
    assert [row.partition("\t")[0] for row in done.stdout.splitlines()] == found


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_scripts_have_every_command_and_every_flag(shell: str) -> None:
    text = script(shell)
    for name, command in COMMANDS.commands.items():
        assert name in text
        for one in command.params:
            for flag in (*one.opts, *one.secondary_opts):
                if flag.startswith("--"):
                    assert (f"{flag}[" in text or f"{flag}=[" in text) if shell == "zsh" else f"-l {flag[2:]} " in text


def test_a_shell_that_is_not_known() -> None:
    done = CliRunner().invoke(app, ["completion", "tcsh"])
    assert done.exit_code == 2
    assert "bash" in done.output
