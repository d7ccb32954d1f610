"""A folder of adapter directories, each served under its own name: `llmserve serve --adapters DIR`.

What cannot be loaded, such as a directory that is still being copied, is logged once and tried again when one of its
files has changed. Until then whatever has the name keeps it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from pathlib import Path
from typing import Protocol

from llmserve.errors import InvalidArgument, LlmserveError, NotFound
from llmserve.serving.loading.repository import Stamp, read_stamp

logger = logging.getLogger(__name__)


class Names(Protocol):
    """Adapters by name."""

    @property
    def names(self) -> Container[str]: ...

    def load(self, name: str, path: Path) -> None: ...

    def unload(self, name: str) -> None: ...


class AdapterFolder:
    def __init__(self, path: Path, served: Names) -> None:
        """Raises NotFound where there is no folder."""
        if not path.is_dir():
            raise NotFound(f"no folder of adapters {path}")
        self._path = path
        self._served = served
        self._stamps: dict[str, Stamp] = {}  # of each directory when it was tried last
        self._loaded: set[str] = set()
        self._problem = ""  # of the folder

    def poll(self, models: Container[str] = ()) -> None:
        """Load what is new or has changed, unload what has gone. A folder that cannot be read has not changed.

        `models`: names that an adapter may not have.
        """
        try:
            found = {entry.name: read_stamp(Path(entry.path)) for entry in os.scandir(self._path) if _counts(entry)}
        except OSError as error:
            if (problem := str(error)) != self._problem:
                logger.error("the folder of adapters cannot be read, and its adapters stay: %s", problem)
            self._problem = problem
            return
        self._problem = ""
        for name in self._stamps.keys() - found.keys():
            del self._stamps[name]
            if name in self._loaded:
                self._loaded.remove(name)
                self._served.unload(name)
                logger.info("adapter '%s' was removed from its folder and is no longer served", name)
        for name, stamp in sorted(found.items()):
            if self._stamps.get(name) != stamp:
                self._stamps[name] = stamp
                self._try(name, models)

    def _try(self, name: str, models: Container[str]) -> None:
        try:
            if name in models:
                raise InvalidArgument("a model has this name; rename the directory")
            if name in self._served.names and name not in self._loaded:
                raise InvalidArgument("an adapter has this name already; rename the directory")
            self._served.load(name, self._path / name)
        except LlmserveError as error:
            stays = ", and the one before it stays" if name in self._loaded else ""
            logger.error("adapter '%s' is not loaded%s, until its files change: %s", name, stays, error)
            return
        self._loaded.add(name)
        logger.info("adapter '%s' is served", name)


def _counts(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()
