"""Hashes the files of a served engine repeatedly, so that disk errors and overwritten files are noticed before answers
change.

It reads the files that were open when it started, even after an engine is replaced by a rename: the new engine is not
read, and the old files do not change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import ExitStack

from llmserve.engine.directory.artifact import CHUNK_BYTES, EngineDirectory
from llmserve.errors import EngineFileError

logger = logging.getLogger(__name__)

BYTES_PER_SECOND = 64 * 2**20  # at most, so that the engine does not wait for the disk


class FileWatch:
    """Runs in its own thread until something has changed or it is closed."""

    def __init__(self, directory: EngineDirectory, every_s: float) -> None:
        self.problem = ""  # the change that was found
        self._directory = directory
        self._every_s = every_s
        self._closed = threading.Event()
        self._open = ExitStack()
        try:
            self._files = {name: self._descriptor(name) for name in sorted(directory.manifest.files)}
        except OSError as error:
            self._open.close()
            raise EngineFileError(f"{directory.path} cannot be read: {error}") from error
        self._thread = threading.Thread(target=self._run, name="llmserve-file-watch", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until something has changed, or it is closed."""
        self._thread.join()

    def close(self) -> None:
        self._closed.set()
        self.wait()

    def _descriptor(self, name: str) -> int:
        descriptor = os.open(self._directory.path / name, os.O_RDONLY)
        self._open.callback(os.close, descriptor)
        return descriptor

    def _run(self) -> None:
        with self._open:
            while not self.problem and not self._closed.wait(self._every_s):
                self.look()

    def look(self) -> None:
        """Hash every file once; the thread calls this itself."""
        for name, descriptor in self._files.items():
            try:
                found = self._digest(descriptor)
            except OSError as error:
                self.problem = f"{name} cannot be read: {error.strerror}"
            else:
                if not self._closed.is_set() and found != self._directory.manifest.files[name].sha256:
                    self.problem = f"{name} was changed: its SHA-256 is not the one in the manifest"
            if self.problem:
                logger.error(
                    "engine %s is no longer ready: %s; copy it again next to the old one, rename it, and load it",
                    self._directory.path,
                    self.problem,
                )
            if self.problem or self._closed.is_set():
                return

    def _digest(self, descriptor: int) -> str:
        """The digest; meaningless if the watch was closed in the meantime."""
        digest, offset = hashlib.sha256(), 0
        while piece := os.pread(descriptor, CHUNK_BYTES, offset):
            digest.update(piece)
            offset += len(piece)
            if self._closed.wait(len(piece) / BYTES_PER_SECOND):
                break
        return digest.hexdigest()
