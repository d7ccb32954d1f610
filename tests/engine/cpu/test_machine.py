"""Cores and memory of this process, with control groups as files in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmserve.engine.cpu import machine

ALL_CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a control group two levels below its root, in which this process is said to be."""
    folder = tmp_path / "slice" / "server"
    folder.mkdir(parents=True)
    real_read = machine._read
    membership = {Path("/proc/self/cgroup"): "1:cpu:/other\n0::/slice/server"}
    monkeypatch.setattr(machine, "_read", lambda path: membership.get(path) or real_read(path))
    return folder


def test_without_limits(tmp_path: Path) -> None:
    assert machine.usable_cores(tmp_path) == ALL_CORES
    assert machine.available_memory(tmp_path) > 2**20


@pytest.mark.parametrize(("text", "cores"), [("max 100000", ALL_CORES), ("100000 100000", 1), ("50000 100000", 1)])
def test_cpu_quota(text: str, cores: int, group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text(text + "\n")
    assert machine.usable_cores(tmp_path) == cores


def test_a_quota_above_the_group_counts_too(group: Path, tmp_path: Path) -> None:
    (group / "cpu.max").write_text("max 100000")
    (group.parent / "cpu.max").write_text("80000 100000")
    assert machine.usable_cores(tmp_path) == 1


def test_affinity(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.usable_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_memory_limit(group: Path, tmp_path: Path) -> None:
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("2000000\n")
    assert machine.available_memory(tmp_path) == 3000000
    (group / "memory.current").write_text("9000000")
    assert machine.available_memory(tmp_path) == 0
    (group / "memory.max").write_text("max")
    assert machine.available_memory(tmp_path) > 2**20
