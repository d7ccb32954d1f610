"""Directories that go with whoever made them: with a block of code, with the process, or with the next one that looks.

Such a directory has an owner at every instant. Before it exists, its removal is registered for the end of the process,
so that an interruption of the code that would remove it (a signal's exception may come between any two instructions)
leaves nothing. While it exists its process holds a lock on it, which the kernel lets go of when the process has died in
whatever way: a directory without a lock is an orphan, and is removed by the next process that makes one of its kind.
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
SHARED = 0o777  # less the process's mask


class OwnedDirectory:
    """`<parent>/<prefix><random>`, from `create` to `remove`; both may be interrupted and called again."""

    def __init__(self, parent: Path, prefix: str, *, mode: int = PRIVATE) -> None:
        self._parent = parent
        self._prefix = prefix
        self._mode = mode
        self._path: Path | None = None
        self._lock: int | None = None
        self._pid = os.getpid()  # a process that is forked from this one owns nothing

    @property
    def path(self) -> Path:
        assert self._path is not None
        return self._path

    def create(self) -> None:
        atexit.register(self.remove)
        while self._lock is None:  # between the two calls another process may have taken it for an orphan
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
    """Directories of that kind whose processes are dead, each locked until the next one is asked for."""
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
    """A descriptor that holds the lock; None when someone else has it, and for what is no directory of this user."""
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
    """In the system's folder for temporary files, rid of this prefix's orphans."""
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
