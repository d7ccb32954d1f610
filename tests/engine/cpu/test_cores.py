"""Cores of this process, with control groups as files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmserve.engine.cpu import cores

ALL_CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a control group two levels below its root, in which this process is said to be."""
    folder = tmp_path / "slice" / "server"
    folder.mkdir(parents=True)
    real_read = cores._read
    membership = {Path("/proc/self/cgroup"): "1:cpu:/other\n0::/slice/server"}
    monkeypatch.setattr(cores, "_read", lambda path: membership.get(path) or real_read(path))
    return folder


def test_without_limits(tmp_path: Path) -> None:
    assert cores.usable_cores(tmp_path) == ALL_CORES


@pytest.mark.parametrize(("text", "expected"), [("max 100000", ALL_CORES), ("100000 100000", 1), ("50000 100000", 1)])
def test_cpu_quota(text: str, expected: int, group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text(text + "\n")
    assert cores.usable_cores(tmp_path) == expected


def test_a_quota_above_the_group_counts_too(group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text("max 100000")
    (group.parent / "cpu.max").write_text("80000 100000")
    assert cores.usable_cores(tmp_path) == 1


def test_affinity(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores.usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)
