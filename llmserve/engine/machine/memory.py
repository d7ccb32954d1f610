"""How much more memory this process may use: the machine's, or its control group's if that is less."""

from __future__ import annotations

import psutil

from llmserve.engine.machine.cgroups import ControlGroup, control_groups

LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}  # by version of the control groups
NO_LIMIT_BYTES = 2**62  # version 1 says "none" with a number near 2^63


def available_memory_bytes() -> int:
    headrooms = [_headroom(group) for group in control_groups("memory")]
    return min([int(psutil.virtual_memory().available), *(room for room in headrooms if room is not None)])


def memory_limit_bytes() -> int | None:
    """The limit of the control groups of this process; None without a limit."""
    limits = [_number(group.read(LIMIT_FILES[group.version])) for group in control_groups("memory")]
    return min((limit for limit in limits if limit is not None and limit < NO_LIMIT_BYTES), default=None)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _headroom(group: ControlGroup) -> int | None:
    """None if the group has no limit. Page cache that the kernel would drop first counts as free."""
    usage = {1: "memory.usage_in_bytes", 2: "memory.current"}[group.version]
    try:
        limit_bytes, used_bytes = int(group.read(LIMIT_FILES[group.version])), int(group.read(usage))
        stat = dict(line.split() for line in group.read("memory.stat").splitlines())
    except ValueError:  # missing, or "max"
        return None
    return max(0, limit_bytes - used_bytes + int(stat.get("inactive_file", 0)))
