"""The output directory exists completely or not at all.

A build writes into a locked temporary sibling and renames it at the end. An exception (Ctrl-C included) removes the
sibling; a build that was killed leaves it without its lock, and the next build of the same output removes it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmserve.engine.artifact import MANIFEST_FILE
from llmserve.errors import AlreadyExists


def check_replaceable(output: Path) -> None:
    """`AlreadyExists` unless `output` is free, empty or an engine directory: nothing else is ever deleted."""
    while True:
        try:
            descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            if not os.path.lexists(output):
                return  # a part of the path is a file: creating it says so
            raise AlreadyExists(f"{output} is a file; choose another --output-dir") from None
        try:
            names = os.listdir(descriptor)
            if not names or MANIFEST_FILE in names:
                return
            if _is_at(descriptor, output):
                raise AlreadyExists(
                    f"{output} exists and is not an engine directory, so it is not replaced; choose another "
                    "--output-dir"
                )
        finally:
            os.close(descriptor)  # another build has moved it away, and was deleting it: look again


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still names what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def staged_directory(output: Path) -> Iterator[Path]:
    """Yield an empty directory beside `output`; on a clean exit it becomes `output`, on any exception it is removed."""
    output = output.resolve()
    check_replaceable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(output)
    staging, lock = _create_locked(output)
    try:
        yield staging
        _flush_to_disk(staging)
        _put_in_place(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _prefix(output: Path) -> str:
    return f".{output.name}.tmp-"


def _create_locked(output: Path) -> tuple[Path, int]:
    """A new sibling and a lock on it. The lock dies with the process: that tells a stale sibling from a live one."""
    while True:
        staging = output.parent / f"{_prefix(output)}{secrets.token_hex(6)}"
        staging.mkdir()
        lock = _try_lock(staging)
        if lock is not None:
            return staging, lock  # otherwise another build took it for stale between the two calls


def _try_lock(directory: Path) -> int | None:
    """A descriptor that holds the lock, or None when someone else has it or the directory is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if directory.exists():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _remove_stale(output: Path) -> None:
    for sibling in output.parent.glob(f"{glob.escape(_prefix(output))}*"):
        lock = _try_lock(sibling)
        if lock is not None:
            shutil.rmtree(sibling, ignore_errors=True)
            os.close(lock)


def _flush_to_disk(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(staging: Path, output: Path) -> None:
    """Rename over a free or empty place. An older engine is moved aside first, and put back on an interruption."""
    aside, lock = _create_locked(output)
    old = aside / "old"
    try:
        while not _renamed(staging, output):
            check_replaceable(output)
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):  # another build of the same output was faster
                output.rename(old)
        _flush(output.parent)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(lock)


def _renamed(staging: Path, output: Path) -> bool:
    """False when something that is not empty is in the way."""
    try:
        staging.rename(output)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
