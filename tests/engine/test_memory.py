from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from llmserve.engine.machine import cgroups, memory


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def test_without_limits_it_is_what_the_machine_has(groups: Path) -> None:
    assert memory.available_memory_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_the_tightest_limit_of_the_group_and_its_ancestors_counts(groups: Path) -> None:
    (groups / "membership").write_text("0::/pod/container\n")
    write_group(groups / "cgroup/pod", memory__max="1000", memory__current="700", memory__stat="inactive_file 50")
    write_group(groups / "cgroup/pod/container", memory__max="max", memory__current="600", memory__stat="")
    assert memory.available_memory_bytes() == 350
    write_group(groups / "cgroup/pod/container", memory__max="650")
    assert memory.available_memory_bytes() == 50


def test_the_first_version_of_cgroups_is_read_too(groups: Path) -> None:
    (groups / "membership").write_text("5:cpu:/x\n4:memory:/pod\n")
    write_group(
        groups / "cgroup/memory/pod", memory__limit_in_bytes="900", memory__usage_in_bytes="1000", memory__stat=""
    )
    assert memory.available_memory_bytes() == 0
