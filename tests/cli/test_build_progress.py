"""What a build says of itself where standard error is no terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from llmserve.cli.build_progress import INTERVAL_S, ProgressLines
from tests.checkpoints import make_checkpoint

MB = 10**6


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_every_few_seconds_says_what_how_much_and_how_fast() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressLines(stream, clock) as progress:
        progress.phase("compile", 400 * MB)
        for _ in range(4):
            clock.now += INTERVAL_S / 2
            progress.advance("layers.0", 25 * MB)
        progress.phase("seal", 30 * MB)
        clock.now += 1
        progress.advance("rank0.engine", 30 * MB)
        progress.phase("hash the checkpoint", 30_000 * MB)  # done in the background meanwhile
        progress.advance("weights", 30_000 * MB)
        clock.now += 0.1
    assert stream.getvalue().splitlines() == [
        "compile:  12%, 50 of 400 MB, 10 MB/s, layers.0",
        "compile:  25%, 100 of 400 MB, 10 MB/s, layers.0",
        "compile: done, 100 MB in 10.0 s",
        "seal: done, 30 MB in 1.0 s",
        "hash the checkpoint: done in 0.1 s",
    ]


def test_a_phase_that_fails_is_not_done() -> None:
    stream = io.StringIO()
    progress = ProgressLines(stream, Clock())
    progress.phase("compile", MB)
    error = ValueError("no")
    progress.__exit__(ValueError, error, None)
    assert stream.getvalue() == ""


def test_a_build_without_a_terminal_says_its_phases_in_plain_lines(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    code = "from llmserve.cli.main import main; main()"
    arguments = ["build", str(checkpoint), "--quantization", "int8", "--output-dir", str(tmp_path / "e")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    phases = [line.split(": done")[0] for line in done.stderr.splitlines() if ": done" in line]
    assert phases == ["equalize", "compile", "hash the checkpoint", "time tactics", "self-test", "seal"]
    assert "\x1b" not in done.stderr
    assert "engine digest" in done.stdout
