"""The files of an engine that is served: a change is noticed, a replacement by a rename is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmserve.engine.directory.artifact import ENGINE_FILE, EngineDirectory
from llmserve.engine.directory.file_watch import FileWatch
from tests.engine.directories import make_engine_directory

NEVER_S = 3600.0


def flip_a_bit(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(100)
        opened.write(b"\xff")


def truncate(file: Path) -> None:
    os.truncate(file, 10)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine_directory(tmp_path / "engine")


@pytest.mark.parametrize("change", [flip_a_bit, truncate])
def test_a_file_that_was_written_over_is_noticed(
    change: Callable[[Path], None], engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = FileWatch(EngineDirectory.open(engine), 0.001)
    assert watch.problem == ""
    change(engine / ENGINE_FILE)
    watch.wait()
    assert watch.problem == f"{ENGINE_FILE} was changed: its SHA-256 is not the one in the manifest"
    (line,) = (each for each in caplog.messages if str(engine) in each)  # whatever other threads log
    assert line.startswith(f"engine {engine} is no longer ready: {ENGINE_FILE} was changed")
    watch.close()


def test_what_takes_the_files_place_is_another_engine(engine: Path, tmp_path: Path) -> None:
    watch = FileWatch(EngineDirectory.open(engine), NEVER_S)
    other = tmp_path / "other"
    shutil.copy(engine / ENGINE_FILE, other)
    flip_a_bit(other)
    other.rename(engine / ENGINE_FILE)
    watch.look()
    assert watch.problem == ""
    shutil.rmtree(engine)
    watch.look()
    assert watch.problem == ""
    watch.close()
