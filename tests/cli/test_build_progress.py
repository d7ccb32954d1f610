"""What a build says of itself where standard error is no terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.cli.build_progress import INTERVAL_S, Estimate, ProgressLines
from llmserve.progress import Phase
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


@pytest.mark.parametrize("slower", [0.5, 1.0, 4.0])
def test_what_is_left_is_known_within_a_third_from_a_third_on(slower: float) -> None:
    """On machines of other speeds, with phases whose shares are off by a fifth."""
    phases = [Phase("equalize", 10.0), Phase("compile", 20.0), Phase("self-test", 40.0), Phase("seal", 1.0)]
    taken = [phase.seconds * slower * factor for phase, factor in zip(phases, (1.2, 0.8, 1.2, 0.8), strict=True)]
    estimate = Estimate(phases)
    for index, phase in enumerate(phases):
        for share in (0.0, 0.25, 0.5, 0.75):
            elapsed = sum(taken[:index]) + share * taken[index]
            left = estimate.seconds_left(phase.name, share, elapsed)
            assert left is not None
            if elapsed > sum(taken) / 3:
                assert left == pytest.approx(sum(taken) - elapsed, rel=1 / 3, abs=1.0)
    assert estimate.seconds_left("another", 0.5, 1.0) is None


def test_a_line_says_which_phase_it_is_and_how_long_the_build_will_take() -> None:
    stream, clock = io.StringIO(), Clock()
    with ProgressLines(stream, clock) as progress:
        progress.expect([Phase("compile", 100.0), Phase("self-test", 100.0)])
        progress.phase("compile", 100 * MB)
        clock.now += 100.0
        progress.advance("layers.0", 50 * MB)
        progress.phase("self-test", 100 * MB)
        clock.now += 99.0
        progress.advance("layers.1", 99 * MB)
    assert stream.getvalue().splitlines() == [
        "compile (1 of 2):  50%, 50 of 100 MB, 0 MB/s, layers.0, about 4 min left",
        "compile (1 of 2): done, 50 MB in 100.0 s",
        "self-test (2 of 2):  99%, 99 of 100 MB, 1 MB/s, layers.1, about 1 s left",
        "self-test (2 of 2): done, 99 MB in 99.0 s",
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
    names = ["equalize", "compile", "hash the checkpoint", "time tactics", "self-test", "seal"]
    assert phases == [f"{name} ({number} of 6)" for number, name in enumerate(names, 1)]
    assert "\x1b" not in done.stderr
    assert "engine digest" in done.stdout
