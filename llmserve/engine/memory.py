"""How much memory this process may still take: the machine's, or its cgroup's when that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_memory_bytes() -> int:
    return min([int(psutil.virtual_memory().available), *_cgroup_headrooms()])


def _cgroup_headrooms() -> list[int]:
    """Bytes left under every memory limit (cgroup v2, else v1) of this process and its ancestors."""
    found = []
    for name, relative in _memberships():
        root = CGROUP_ROOT / name
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes") if name else ("memory.max", "memory.current")
        folder = root / relative.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            headroom = _headroom(group, limit, usage)
            if headroom is not None:
                found.append(headroom)
    return found


def _memberships() -> list[tuple[str, str]]:
    """(controller folder, group path): ("", path) for cgroup v2, ("memory", path) for v1."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [
        ("memory" if controllers else "", path)
        for _, controllers, path in entries
        if controllers == "" or "memory" in controllers.split(",")
    ]


def _headroom(group: Path, limit: str, usage: str) -> int | None:
    """None when the group has no limit. The page cache that the kernel would drop first counts as free."""
    try:
        limit_bytes = int((group / limit).read_text())
        used_bytes = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not there, or "max"
        return None
    return max(0, limit_bytes - used_bytes + int(stat.get("inactive_file", 0)))
