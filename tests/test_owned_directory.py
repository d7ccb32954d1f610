"""Directories that have an owner: removed at the end of a block or of the process, or by the next process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.owned_directory import OwnedDirectory, orphans, remove_orphans, temporary_directory

HOLDS = """
import sys, time
from pathlib import Path
from llmserve.owned_directory import new_temporary_directory
made = new_temporary_directory("owned-test-")
(made.path / "file").write_text("x")
print(made.path, flush=True)
{}
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holder(rest: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS.format(rest)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        return process, Path(lines.readline().strip())


def test_it_goes_with_the_process_that_made_it(temporary: Path) -> None:
    process, path = holder("")
    assert process.wait(20) == 0
    assert not path.exists()


def test_that_of_a_killed_process_goes_with_the_next_one(temporary: Path) -> None:
    process, path = holder("time.sleep(60)")
    with temporary_directory("owned-test-") as own:
        assert sorted(temporary.iterdir()) == sorted([own, path])
        assert own.stat().st_mode & 0o777 == 0o700
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    assert list(temporary.iterdir()) == [path]
    with temporary_directory("owned-test-") as own:
        assert list(temporary.iterdir()) == [own]
    assert list(temporary.iterdir()) == []


def test_a_forked_process_does_not_remove_it(tmp_path: Path) -> None:
    made = OwnedDirectory(tmp_path, "d-")
    made.create()
    pid = os.fork()
    if pid == 0:
        made.remove()
        os._exit(0)
    os.waitpid(pid, 0)
    assert made.path.exists()
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_directories_of_this_user_and_kind_are_orphans(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "d-link").symlink_to("elsewhere")
    (tmp_path / "d-file").touch()
    (tmp_path / "e-1").mkdir()
    (tmp_path / "d-1").mkdir()
    assert [path.name for path in orphans(tmp_path, "d-")] == ["d-1"]
    remove_orphans(tmp_path, "d-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d-file", "d-link", "e-1", "elsewhere"]


def test_directories_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d-1").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: 1 << 20)
    assert list(orphans(tmp_path, "d-")) == []
