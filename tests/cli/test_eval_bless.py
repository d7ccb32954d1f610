"""`llmserve eval bless`, from the command line."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from llmserve.cli.app import app
from llmserve.evaluation.judging.blessing import blessed_by, trace_of
from llmserve.evaluation.suite import load_suite
from llmserve.sealed_log import Verifier, read
from tests.evaluation.suites import write_suite
from tests.test_sealed_log import new_key


def bless(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["eval", "bless", *map(str, arguments)])


def test_a_blessing_says_what_it_moves_and_is_signed(tmp_path: Path) -> None:
    suite = write_suite(tmp_path)
    private, public = new_key(tmp_path)
    done = bless(suite, "--by", "Ann", "--why", "first release", "--sign-key", private)
    assert done.exit_code == 0, done.output
    assert "margins.rougeL: none -> 10" in done.output
    assert str(trace_of(suite)) in done.output.replace("\n", "")
    assert blessed_by(suite, load_suite(suite).rules()) == "Ann"
    (line,) = read(trace_of(suite))
    assert Verifier.load(public).problem(line) == ""


def test_it_is_a_command_of_its_own_beside_evaluations(tmp_path: Path) -> None:
    assert "Missing option '--by'" in bless(write_suite(tmp_path), "--why", "x").output
    assert (
        "Usage: llmserve eval bless"
        in CliRunner().invoke(app, ["eval", "bless", "--help"], prog_name="llmserve").output
    )
    shown = CliRunner().invoke(app, ["eval", "--help"], prog_name="llmserve").output
    assert "Usage: llmserve eval [OPTIONS]" in shown
    assert "llmserve eval bless SUITE" in shown
