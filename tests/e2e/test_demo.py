"""`make demo`, from the installed environment on: build, eval, serve, chat, exit 0."""

from __future__ import annotations

import subprocess
import sys

from tests.e2e.conftest import ROOT


def test_the_demo_runs_to_its_end() -> None:
    done = subprocess.run(
        [sys.executable, "tools/demo.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("engine digest", "ROUGE-L", "PASS: ", "| ensemble       | 1       | READY", "Done in"):
        assert words in done.stdout
