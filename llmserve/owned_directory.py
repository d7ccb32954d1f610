"""Directories that are removed with their owner: a block of code, a process, or the next process that looks.

Such a directory has an owner at every instant. Its removal at process exit is registered before it is created. So even
if the code that removes it is interrupted (a signal's exception can come between any two instructions), it is removed.
While it exists, its process holds a lock on it, which the kernel releases however the process dies. A directory without
a lock is an orphan; the next process that creates one of the same kind removes it.
"""

from __future__ import annotations

import atexit
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o700
SHARED = 0o777  # minus the process's umask


class OwnedDirectory:
    """`<parent>/<prefix><random>`, from `create` to `remove`; both may be interrupted and called again."""

    def __init__(self, parent: Path, prefix: str, *, mode: int = PRIVATE) -> None:
        self._parent = parent
        self._prefix = prefix
        self._mode = mode
        self._path: Path | None = None
        self._lock: int | None = None
        self._pid = os.getpid()  # a process forked from this one does not own the directory

    @property
    def path(self) -> Path:
        assert self._path is not None
        return self._path

    def create(self) -> None:
        atexit.register(self.remove)
        while self._lock is None:  # between the two calls, another process may have removed it as an orphan
            self._path = self._parent / f"{self._prefix}{secrets.token_hex(6)}"
            self._path.mkdir(self._mode)
            self._lock = try_lock(self._path)

    def remove(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        if self._lock is not None:
            lock, self._lock = self._lock, None
            os.close(lock)
        atexit.unregister(self.remove)


def orphans(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields directories with this prefix whose processes are dead, each locked until the next one is requested."""
    for path in parent.glob(f"{glob.escape(prefix)}*"):
        lock = try_lock(path)
        if lock is not None:
            try:
                yield path
            finally:
                os.close(lock)


def remove_orphans(parent: Path, prefix: str) -> None:
    for path in orphans(parent, prefix):
        shutil.rmtree(path, ignore_errors=True)


def try_lock(directory: Path) -> int | None:
    """Returns a descriptor that holds the lock; None if another process has it or the directory is not this user's."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if directory.exists() and os.fstat(descriptor).st_uid == os.geteuid():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def new_temporary_directory(prefix: str) -> OwnedDirectory:
    """Creates one in the system's folder for temporary files, and removes orphans with this prefix first."""
    parent = Path(tempfile.gettempdir())
    remove_orphans(parent, prefix)
    made = OwnedDirectory(parent, prefix)
    made.create()
    return made


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    made = new_temporary_directory(prefix)
    try:
        yield made.path
    finally:
        made.remove()
