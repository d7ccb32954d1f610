"""Control groups of both versions, as files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.engine.machine import cgroups
from llmserve.engine.machine.cgroups import ControlGroup, control_groups


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def test_a_group_and_those_above_it(folder: Path) -> None:
    (folder / "membership").write_text("0::/pod/container\n")
    root = folder / "cgroup"
    assert list(control_groups("cpu")) == [
        ControlGroup(root / "pod/container", 2), ControlGroup(root / "pod", 2), ControlGroup(root, 2)
    ]  # fmt: skip


def test_the_first_version_has_a_tree_per_controller(folder: Path) -> None:
    (folder / "membership").write_text("7:memory:/m\n4:cpu,cpuacct:/c\n1:name=systemd:/s\n0::/\n")
    root = folder / "cgroup"
    assert list(control_groups("cpu")) == [
        ControlGroup(root / "cpu/c", 1), ControlGroup(root / "cpu", 1), ControlGroup(root, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("text", [None, "", "nonsense\n"])
def test_a_system_without_them_has_no_limits(text: str | None, folder: Path) -> None:
    if text is not None:
        (folder / "membership").write_text(text)
    assert [group for group in control_groups("memory") if group.read("memory.max")] == []
