"""A log file on a disk that is full."""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path

import pytest

from llmserve.frontends.shared.log_settings import LogFile


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("llmserve", logging.ERROR, "", 0, text, (), None)


class Full(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(str(tmp_path / "log"))
    opened = log.setStream(Full())
    assert opened is not None
    opened.close()
    for _ in range(3):
        log.handle(record("x"))
    said = f"error: log file {tmp_path / 'log'} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said
    log.setStream(io.TextIOWrapper(io.BytesIO()))
    log.handle(record("there is room again"))
    log.setStream(Full())
    log.handle(record("x"))
    assert capsys.readouterr().err == said


def test_other_records_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(str(tmp_path / "log"))
    log.handle(record("one"))
    log.close()
    assert (tmp_path / "log").read_text() == "one\n"
    assert capsys.readouterr().err == ""


def test_a_file_that_is_moved_is_followed_by_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, moved = tmp_path / "logs/log", tmp_path / "moved"
    path.parent.mkdir()
    log = LogFile(str(path))
    log.handle(record("one"))
    path.rename(moved)
    log.handle(record("two"))
    assert (moved.read_text(), path.read_text()) == ("one\n", "two\n")
    path.parent.rename(tmp_path / "gone")
    log.handle(record("lost"))
    assert capsys.readouterr().err == f"error: log file {path} cannot be written: No such file or directory\n"
    path.parent.mkdir()
    log.handle(record("three"))
    log.close()
    assert path.read_text() == "three\n"


def test_a_path_that_is_no_text_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LogFile(str(tmp_path / "log"))
    log.handle(record(os.fsdecode(b"engine \xff")))
    log.close()
    assert (tmp_path / "log").read_text() == "engine \\udcff\n"
    assert capsys.readouterr().err == ""


def test_standard_error_on_the_same_disk_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(str(tmp_path / "log"))
    opened = log.setStream(Full())
    assert opened is not None
    opened.close()
    monkeypatch.setattr("sys.stderr", Full())
    log.handle(record("x"))
