"""How much memory this process may still take: the machine's, or its cgroup's when that is less."""

from __future__ import annotations

import psutil

from llmserve.engine.cgroups import ControlGroup, control_groups


def available_memory_bytes() -> int:
    headrooms = [_headroom(group) for group in control_groups("memory")]
    return min([int(psutil.virtual_memory().available), *(room for room in headrooms if room is not None)])


def _headroom(group: ControlGroup) -> int | None:
    """None when the group has no limit. The page cache that the kernel would drop first counts as free."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    limit, usage = names[group.version]
    try:
        limit_bytes, used_bytes = int(group.read(limit)), int(group.read(usage))
        stat = dict(line.split() for line in group.read("memory.stat").splitlines())
    except ValueError:  # not there, or "max"
        return None
    return max(0, limit_bytes - used_bytes + int(stat.get("inactive_file", 0)))
