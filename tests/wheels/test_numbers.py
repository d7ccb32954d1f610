"""The wheels' library computes what one that was compiled here computes: the tests of the engine, run against it.

`kernel_steps` (tests/engine/cpu/other_process.py) is linked to the library of the wheel; for another processor it runs
under QEMU. Among those tests is one that compares logits with this installation's, to the bit.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "llmserve/engine/cpu/kernels"
TESTS = ("tests/engine/cpu/test_logits.py", "tests/engine/cpu/test_determinism.py")
EMULATOR = "qemu-aarch64-static"
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")  # Debian's libc6-arm64-cross

pytestmark = pytest.mark.timeout(1800)


def program(library: Path, processor: str) -> str:
    """The command of `kernel_steps`."""
    zig = pytest.importorskip("ziglang").__file__
    compiler = [str(Path(zig).with_name("zig")), "c++", "-target", f"{processor}-linux-gnu.2.28", "-std=c++20", "-O2"]
    source, target = ROOT / "tests/engine/cpu/kernels/test_steps.cpp", library.with_name("kernel_steps")
    linked = [str(source), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(target)]
    subprocess.run([*compiler, "-idirafter", str(KERNELS), *linked], check=True)
    if processor == platform.machine():
        return str(target)
    return f"{EMULATOR} -L {ARM_LIBRARIES} {target}"


def test_the_tests_of_the_engine_pass_with_it(library: Path, processor: str) -> None:
    if processor != platform.machine() and not (shutil.which(EMULATOR) and ARM_LIBRARIES.is_dir()):
        pytest.skip(
            f"needs {EMULATOR} and {ARM_LIBRARIES}; on Debian: apt-get install qemu-user-static libc6-arm64-cross"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS]
    variables = {**os.environ, "LLMSERVE_STEPS_PROGRAM": program(library, processor)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
