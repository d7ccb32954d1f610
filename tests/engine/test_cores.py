"""Cores of this process, with control groups as files in a folder; threads of an engine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from llmserve.engine.machine import cgroups, cores
from llmserve.errors import InvalidArgument

ALL_CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a control group two levels below its root, in which this process is said to be."""
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text("3:cpu,cpuacct:/old\n1:memory:/other\n0::/slice/server\n")
    folder = tmp_path / "slice" / "server"
    folder.mkdir(parents=True)
    return folder


def test_without_limits(group: Path) -> None:
    assert cores.usable_cores() == ALL_CORES


@pytest.mark.parametrize(("text", "expected"), [("max 100000", ALL_CORES), ("100000 100000", 1), ("50000 100000", 1)])
def test_cpu_quota(text: str, expected: int, group: Path) -> None:
    (group / "cpu.max").write_text(text + "\n")
    assert cores.usable_cores() == expected


def test_a_quota_above_the_group_counts_too(group: Path) -> None:
    (group / "cpu.max").write_text("max 100000")
    (group.parent / "cpu.max").write_text("80000 100000")
    assert cores.usable_cores() == 1


@pytest.mark.parametrize(("quota", "expected"), [("-1", ALL_CORES), ("100000", 1), ("5000", 1)])
def test_quota_of_the_first_version(quota: str, expected: int, group: Path, tmp_path: Path) -> None:
    old = tmp_path / "cpu" / "old"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.usable_cores() == expected


def test_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 3)
    with caplog.at_level(logging.WARNING):
        assert (cores.num_threads(0), cores.num_threads(2), cores.num_threads(3)) == (3, 2, 3)
        assert not caplog.records
        assert cores.num_threads(48) == 48
    assert "48 threads share 3 cores" in caplog.text
    for wanted in (-1, 49, 10**6):
        with pytest.raises(InvalidArgument, match=f"threads must be 0 .* to 48, .* got {wanted}"):
            cores.num_threads(wanted)
