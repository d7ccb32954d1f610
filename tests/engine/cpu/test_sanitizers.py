"""The C++ test program, built with address and undefined-behaviour sanitizers: every kernel of every instruction set on
buffers of exactly the needed size, and the engine on damaged files."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.engine.cpu.runner import available_isas
from tests.engine.cpu.networks import LIMITS, odd_network

ROOT = Path(__file__).parents[3]
BUILD = ROOT / ".cmake-build" / "sanitize"  # kept: only what has changed is compiled again

pytestmark = pytest.mark.timeout(1200)  # the first build takes minutes on a busy machine

TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # those of the virtual environment first


def run(*command: str | Path, **environment: str) -> str:
    variables = {**os.environ, "PATH": TOOLS, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=variables)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def kernel_tests() -> Path:
    if not (shutil.which("cmake", path=TOOLS) and shutil.which("ninja", path=TOOLS)):
        pytest.skip("cmake and ninja are not installed")
    run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DLLMSERVE_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug")
    run("cmake", "--build", BUILD, "--parallel", "2")
    return BUILD / "llmserve" / "engine" / "cpu" / "kernels" / "kernel_tests"


def test_kernels_and_damaged_files_under_sanitizers(kernel_tests: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(LIMITS, quantization="int4", dtype="float16", tokens_per_block=2, max_num_tokens=16)
    engine = odd_network().compile(tmp_path / "rank0.engine", options)
    output = run(kernel_tests, engine, tmp_path / "damaged.engine", ASAN_OPTIONS="detect_leaks=1")
    assert [line.split()[0] for line in output.splitlines() if line.endswith("done")] == available_isas()
    assert "damaged files were still well-formed" in output
