"""Compiles a wheel for each kind of processor: `make wheels`.

The library is C++ behind a C interface that ctypes loads, so a wheel is for any Python 3 and for one kind of processor
(py3-none-manylinux_2_28_x86_64). Zig's clang compiles it against the symbols of glibc 2.28 (Debian 10, RHEL 8, Ubuntu
20.04 and newer), whatever this machine has.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import ziglang

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
ZIG = Path(ziglang.__file__).with_name("zig")
GLIBC = "2.28"
PROCESSORS = ("x86_64", "aarch64")


def platform_tag(processor: str) -> str:
    return f"manylinux_{GLIBC.replace('.', '_')}_{processor}"


def compile_wheel(processor: str, folder: Path) -> Path:
    """Returns the wheel, named after this machine's platform, because pip accepts no other."""
    defined = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "tools/wheels/zig.cmake",
        "LLMSERVE_ZIG": ZIG,
        "LLMSERVE_PROCESSOR": processor,
        "LLMSERVE_GLIBC": GLIBC,
    }
    settings = [f"build-dir={ROOT}/.cmake-build/wheel-{processor}", "install.strip=false"]
    settings += [f"cmake.define.{name}={value}" for name, value in defined.items()]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel", "--no-deps"]
    subprocess.run([*command, *(f"-C{setting}" for setting in settings), "--wheel-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def main() -> None:
    DIST.mkdir(exist_ok=True)
    for processor in PROCESSORS:
        print(f"== {platform_tag(processor)}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            wheel = compile_wheel(processor, Path(folder))
            command = [sys.executable, "-m", "wheel", "tags", "--platform-tag", platform_tag(processor), str(wheel)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (tagged,) = Path(folder).glob("*manylinux*.whl")
            tagged.replace(DIST / tagged.name)
            print(DIST / tagged.name)


main()
