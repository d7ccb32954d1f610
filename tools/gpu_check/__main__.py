"""`python -m tools.gpu_check`: tools.check_gpu for CUDA engines, on a machine that has only PyTorch and a kit.

The packages of `--kit` are unpacked into `gpu-kit-unpacked`, where this process and its child processes find them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "gpu-kit-unpacked"
METADATA = "METADATA"
LIBRARY = "libllmserve_cpu.so"  # LIBRARY_NAME of llmserve.engine.native.library, whose import needs packages


def unpack(kit: Path) -> None:
    wheels, done = sorted((kit / "wheels").glob("*.whl")), SITE / "unpacked.txt"
    names = "\n".join(wheel.name for wheel in wheels)
    if not done.is_file() or done.read_text() != names:
        for wheel in wheels:
            with ZipFile(wheel) as archive:
                archive.extractall(SITE)
        done.write_text(names)
    facts = SITE / "llmserve-0.dist-info"  # makes the checkout count as installed
    facts.mkdir(parents=True, exist_ok=True)
    shutil.copy(kit / METADATA, facts)
    sys.path.insert(0, str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    installed = ROOT / "llmserve/engine/native" / LIBRARY
    if not installed.is_file():
        shutil.copy(kit / LIBRARY, installed)


if __name__ == "__main__":
    if "--kit" in sys.argv[1:-1]:
        unpack(Path(sys.argv[sys.argv.index("--kit") + 1]))
    from tools.check_gpu import main

    sys.exit(main(["--target", "cuda", *sys.argv[1:]]))
