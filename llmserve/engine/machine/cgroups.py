"""The control groups of this process, which limit its memory and processor time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    folder: Path
    version: int  # version 1 or 2, which have different file names

    def read(self, name: str) -> str:
        """Empty if there is no such file, which means no limit."""
        return read_text(self.folder / name)


def control_groups(controller: str) -> Iterator[ControlGroup]:
    """The group of `controller` ("cpu", "memory") that this process is in, and the groups above it.

    In a container, the group's own folder may be invisible; then the visible groups above it count.
    """
    for line in read_text(MEMBERSHIP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (CGROUP_ROOT / controller, 1) if controllers else (CGROUP_ROOT, 2)
        folder = root / path.lstrip("/")
        yield from (ControlGroup(group, version) for group in (folder, *folder.parents) if group.is_relative_to(root))


def read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
