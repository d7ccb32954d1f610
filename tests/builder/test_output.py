from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.output import check_replaceable, staged_directory
from llmserve.errors import AlreadyExists, InvalidArgument

ROOT = Path(__file__).resolve().parents[2]


def write_engine(output: Path, content: str) -> None:
    with staged_directory(output) as directory:
        (directory / "rank0.engine").write_text(content)
        (directory / "manifest.json").write_text(content)


def test_the_directory_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "engines" / "a"
    with staged_directory(output) as directory:
        (directory / "manifest.json").write_text("x")
        assert not output.exists()
    assert [path.name for path in (tmp_path / "engines").iterdir()] == ["a"]
    assert (output / "manifest.json").read_text() == "x"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def stumble() -> None:
        with staged_directory(tmp_path / "a") as directory:
            (directory / "rank0.engine").write_text("half")
            raise error

    with pytest.raises(error):
        stumble()
    assert list(tmp_path.iterdir()) == []


def test_an_older_engine_is_replaced_and_survives_a_failure(tmp_path: Path) -> None:
    output = tmp_path / "a"
    write_engine(output, "old")
    with pytest.raises(RuntimeError), staged_directory(output):
        raise RuntimeError
    assert (output / "rank0.engine").read_text() == "old"
    write_engine(output, "new")
    assert (output / "rank0.engine").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_older_engine_comes_back_when_the_last_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "a"
    write_engine(output, "old")
    rename = Path.rename

    def failing(self: Path, place: Path) -> Path:
        if place == output and self.name != "old" and not output.exists():
            raise OSError("the disk is gone")
        return rename(self, place)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        write_engine(output, "new")
    assert (output / "rank0.engine").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_empty_directory_and_a_link_to_an_engine_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_engine(tmp_path / "empty", "1")
    (tmp_path / "link").symlink_to("empty")
    write_engine(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty/rank0.engine").read_text() == "2"


def test_anything_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years")
    (tmp_path / "file").write_text("x")
    for name in ("precious", "file"):
        with pytest.raises(AlreadyExists, match="choose another --output-dir"):
            check_replaceable(tmp_path / name)
        with pytest.raises(AlreadyExists), staged_directory(tmp_path / name):
            pass
    assert (tmp_path / "precious/thesis.txt").read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "precious"]


def test_a_path_that_cannot_be_looked_at_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be written: File name too long; choose another --output-dir"):
        check_replaceable(tmp_path / ("a" * 300))


def test_a_killed_build_is_cleaned_up_by_the_next_one_of_the_same_output(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from llmserve.builder.output import staged_directory\n"
        "with staged_directory(Path(sys.argv[1])) as d:\n"
        "    (d / 'rank0.engine').write_text('half'); print('ready', flush=True); time.sleep(60)"
    )
    output = tmp_path / "a[1]"
    with subprocess.Popen([sys.executable, "-c", code, str(output)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        write_engine(output, "while the other lives")
        (live,) = tmp_path.glob(".*")
        os.kill(process.pid, signal.SIGKILL)
    assert live.exists()
    write_engine(tmp_path / "b", "another output")
    assert live.exists()
    write_engine(output, "after its death")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[1]", "b"]


def test_an_engine_that_another_build_moves_away_and_deletes_meanwhile_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, listdir = tmp_path / "a", os.listdir
    write_engine(output, "old")

    def list_late(place: Any) -> list[str]:
        """What has been opened is read after another build has come and gone."""
        if not (tmp_path / "aside").exists():
            place = os.open(place, os.O_RDONLY) if isinstance(place, Path) else place
            output.rename(tmp_path / "aside")
            (tmp_path / "aside" / "manifest.json").unlink()
            write_engine(output, "another")
        return listdir(place)

    monkeypatch.setattr(os, "listdir", list_late)
    check_replaceable(output)
    (output / "manifest.json").unlink()
    with pytest.raises(AlreadyExists, match="not an engine directory"):
        check_replaceable(output)


def test_builds_of_the_same_output_at_once_leave_one_whole_engine(tmp_path: Path) -> None:
    output = tmp_path / "a"
    failures: list[BaseException] = []

    def build_many(name: str) -> None:
        try:
            for number in range(20):
                write_engine(output, f"{name}{number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=build_many, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (output / "manifest.json").read_text() == (output / "rank0.engine").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_ended_at_any_instant_leaves_nothing(tmp_path: Path, number: int) -> None:
    """And whole engines only. After a SIGKILL it is the next build that finds nothing, and the older engine."""
    command = [sys.executable, "-m", "tests.builder.interruptions", str(tmp_path), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    *problems, num_instants = done.stdout.splitlines()
    assert problems == []
    assert int(num_instants) > 200
