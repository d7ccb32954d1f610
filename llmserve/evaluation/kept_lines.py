"""A file of JSON lines that a run writes step by step, so that the next run can resume after an interruption.

The first line says what the others depend on; if it differs, the file belongs to another run and is emptied. Every
other line is one result, written at once. Only complete lines count: a truncated or damaged rest is dropped. One run at
a time locks the file; the kernel releases the lock however the run ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any, Generic, TypeVar

from llmserve.errors import InvalidArgument

Line = TypeVar("Line")


class KeptLines(Generic[Line]):
    """`earlier`: results of previous runs, converted by `parse`."""

    def __init__(self, path: Path, file: BufferedRandom, earlier: Sequence[Line]) -> None:
        self._path = path
        self._file = file
        self.earlier = earlier

    def add(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """Remove the file, because everything in it is stored elsewhere."""
        self._path.unlink(missing_ok=True)


@contextmanager
def kept_lines(
    path: Path, head: Mapping[str, Any], parse: Callable[[Any], Line], *, taken: str
) -> Iterator[KeptLines[Line]]:
    """For the run that `head` describes. `parse` raises `ValueError`, `KeyError` or `TypeError` for a damaged line.

    `InvalidArgument` if another run has locked the file (`taken` says what to do then), or if it is not writable.
    """
    with _locked(path, taken) as file:
        yield KeptLines(path, file, _read(file, head, parse))


@contextmanager
def _locked(path: Path, taken: str) -> Iterator[BufferedRandom]:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        except OSError as error:
            raise InvalidArgument(f"the answers cannot be written to {path}: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidArgument(f"another run is writing its answers to {path}; {taken}") from error
            if not _is_at(path, file):
                continue
            yield file
            return


def _is_at(path: Path, file: BufferedRandom) -> bool:
    """Whether the open file still has that name: the run that had locked it may have removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _read(file: BufferedRandom, head: Mapping[str, Any], parse: Callable[[Any], Line]) -> list[Line]:
    """Read every complete line of this run; truncate the rest, and empty a file of another run."""
    first = json.dumps(head).encode() + b"\n"
    if file.readline() != first:
        file.seek(0)
        file.truncate()
        file.write(first)
        file.flush()
        return []
    lines = []
    end = file.tell()
    for text in file:
        try:
            line = parse(json.loads(text))
        except (ValueError, KeyError, TypeError):
            break
        if not text.endswith(b"\n"):
            break
        lines.append(line)
        end += len(text)
    file.seek(end)
    file.truncate()
    return lines
