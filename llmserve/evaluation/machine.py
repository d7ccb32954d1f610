"""What measured: the processor and the versions, for reports. No host names, no dates."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "llmserve", "numpy", "rouge-score", "sacrebleu", "jsonschema", "datasets", "sentencepiece", "tokenizers", "torch",
    "transformers",
)  # fmt: skip


def machine_name() -> str:
    """Processor model and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} cores"


def processor() -> str:
    """Its model, where the system says it; else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def package_versions() -> dict[str, str]:
    """Of Python and of every package that can change a number in a report; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
