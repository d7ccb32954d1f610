"""The output directory exists completely or not at all.

A build writes into a temporary sibling that it owns (`owned_directory.py`) and renames it at the end. An exception,
Ctrl-C included, removes the sibling. If a build was killed, the next build of the same output removes it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from llmserve.engine.adapters.sealed import ADAPTER_FILE
from llmserve.engine.directory.artifact import MANIFEST_FILE
from llmserve.errors import AlreadyExists, InvalidArgument
from llmserve.owned_directory import SHARED, OwnedDirectory, orphans

OLD = "old"  # inside the directory that holds the replaced engine


class Kind(NamedTuple):
    """A kind of directory that is built, and how to recognize it."""

    marker: str
    refusal: str  # message about any other directory


ENGINE = Kind(MANIFEST_FILE, "already exists and is not an engine directory, so it is not replaced")
ADAPTER = Kind(ADAPTER_FILE, "already exists and is not an adapter directory, so it is not replaced")


def check_replaceable(output: Path, kind: Kind = ENGINE) -> None:
    """`AlreadyExists` unless `output` does not exist, is empty or is of this kind: nothing else is ever deleted."""
    while True:
        try:
            descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            if not os.path.lexists(output):
                return  # a part of the path is a file: creating it will report that
            raise AlreadyExists(f"{output} is a file; choose another --output-dir") from None
        except OSError as error:
            raise InvalidArgument(
                f"{output} cannot be written: {error.strerror}; choose another --output-dir"
            ) from error
        try:
            names = os.listdir(descriptor)
            if not names or kind.marker in names:
                return
            if _is_at(descriptor, output):
                raise AlreadyExists(f"{output} {kind.refusal}; choose another --output-dir")
        finally:
            os.close(descriptor)  # another build moved it away and was deleting it: look again


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still refers to the opened directory."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def staged_directory(output: Path, kind: Kind = ENGINE) -> Iterator[Path]:
    """Yield an empty directory next to `output`; on success it becomes `output`, on any exception it is removed."""
    output = output.resolve()
    check_replaceable(output, kind)
    output.parent.mkdir(parents=True, exist_ok=True)
    for orphan in orphans(output.parent, _prefix(output)):
        _put_back(orphan, output)
        shutil.rmtree(orphan, ignore_errors=True)
    staging = OwnedDirectory(output.parent, _prefix(output), mode=SHARED)
    try:
        staging.create()
        yield staging.path
        _flush_to_disk(staging.path)
        _put_in_place(staging.path, output, kind)
    finally:
        staging.remove()


def _prefix(output: Path) -> str:
    return f".{output.name}.tmp-"


class _Aside(OwnedDirectory):
    """Holds the old engine while the new one takes its place. Removing it restores the old engine if necessary."""

    def __init__(self, output: Path) -> None:
        super().__init__(output.parent, _prefix(output))
        self._output = output

    def remove(self) -> None:
        if self._path is not None:
            _put_back(self._path, self._output)
        super().remove()


def _put_back(aside: Path, output: Path) -> None:
    """Restore the engine that was moved aside, unless another has taken its place."""
    with suppress(OSError):
        if not output.exists():
            (aside / OLD).rename(output)


def _flush_to_disk(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        flush(path)


def flush(path: Path) -> None:
    """Flush to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(staging: Path, output: Path, kind: Kind) -> None:
    """Rename to a free or empty place. A replaced engine is moved aside first, and restored on an interruption."""
    aside = _Aside(output)
    try:
        aside.create()
        old = aside.path / OLD
        while not _renamed(staging, output):
            check_replaceable(output, kind)
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):  # another build of the same output was faster
                output.rename(old)
        flush(output.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        aside.remove()


def _renamed(staging: Path, output: Path) -> bool:
    """False if a non-empty directory is in the way."""
    try:
        staging.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
