"""How many cores this process may use: its affinity mask, or less where a cgroup limits its time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores in the affinity mask, or fewer when a CPU quota allows less time."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroups(cgroup_root):
        quota = _read(folder / "cpu.max").split()
        if len(quota) == 2 and quota[0] != "max":
            cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(cores, 1)


def _cgroups(root: Path) -> Iterator[Path]:
    """The folders of this process's control group and of the groups above it (version 2 only)."""
    lines = _read(Path("/proc/self/cgroup")).splitlines()
    name = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / name.lstrip("/")
    yield from (group for group in (folder, *folder.parents) if group.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
