"""A description of this machine for reports and records, which says where a time was measured. No host names."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine_name() -> str:
    """The processor model and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} cores"


def processor() -> str:
    """The processor's model if known; else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
