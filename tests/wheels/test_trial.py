"""A wheel in a fresh environment, where no compiler is: see tools/wheels/trial.py."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

TRIAL = Path(__file__).resolve().parents[2] / "tools/wheels/trial.py"


def test_it_is_installed_builds_an_engine_and_serves_it_without_a_compiler(wheels: dict[str, Path]) -> None:
    command = [sys.executable, str(TRIAL), str(wheels[platform.machine()])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
