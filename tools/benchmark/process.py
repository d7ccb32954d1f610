"""Runs a module in its own process, with the interpreter of its environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.benchmark.environment import last_lines

ROOT = Path(__file__).resolve().parents[2]


def run_module(python: Path, arguments: Sequence[str], *, threads: int, timeout_s: float) -> str:
    """Runs `python -m arguments...` with this number of threads. Returns why it failed, or an empty string."""
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [str(python), "-m", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(arguments[:2])} took longer than {timeout_s:g} s"
    except OSError as error:
        return f"{python} could not be started: {error}"
    killed = f"killed by signal {-done.returncode}: " if done.returncode < 0 else ""
    return f"{killed}{last_lines(done.stderr)}" if done.returncode else ""
