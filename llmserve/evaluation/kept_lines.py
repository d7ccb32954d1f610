"""A file of JSON lines that a run writes as it goes, so that the next one can go on after an interruption.

The first line says what the others depend on; a file that says anything else there is of another run, and begins anew.
Every other line is one result, written as soon as it was there. Whole lines count: what follows them, cut off while it
was written or damaged, is dropped. One run at a time has the file; the kernel lets go of it when that has ended in
whatever way.
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
    """`earlier`: of the runs before this one, as `parse` made them."""

    def __init__(self, path: Path, file: BufferedRandom, earlier: Sequence[Line]) -> None:
        self._path = path
        self._file = file
        self.earlier = earlier

    def add(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """The file: everything in it is stored elsewhere by now."""
        self._path.unlink(missing_ok=True)


@contextmanager
def kept_lines(
    path: Path, head: Mapping[str, Any], parse: Callable[[Any], Line], *, taken: str
) -> Iterator[KeptLines[Line]]:
    """Of the run that `head` describes. `parse` raises `ValueError`, `KeyError` or `TypeError` for a damaged line.

    `InvalidArgument` while another run has the file (`taken` says what to do then), or when nobody can write to it.
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
            raise InvalidArgument(f"answers cannot be written to {path}: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidArgument(f"another run writes its answers to {path}; {taken}") from error
            if not _is_at(path, file):
                continue
            yield file
            return


def _is_at(path: Path, file: BufferedRandom) -> bool:
    """Whether the open file is still the one of that name: the run that had it may have removed it meanwhile."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _read(file: BufferedRandom, head: Mapping[str, Any], parse: Callable[[Any], Line]) -> list[Line]:
    """Every whole line of this run; what follows them is cut off, and a file of another run emptied."""
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
