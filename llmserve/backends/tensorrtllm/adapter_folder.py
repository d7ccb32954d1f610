"""A folder of adapter directories, each served under its own name: `llmserve serve --adapters DIR`.

A directory that cannot be loaded, for example because it is still being copied, is logged once and tried again when one
of its files changes. Until then, the previous adapter of that name stays.
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
        """Raises NotFound if the folder does not exist."""
        if not path.is_dir():
            raise NotFound(f"the folder of adapters {path} does not exist")
        self._path = path
        self._served = served
        self._stamps: dict[str, Stamp] = {}  # state of each directory at the last attempt
        self._loaded: set[str] = set()
        self._problem = ""  # state of the folder

    def poll(self, models: Container[str] = ()) -> None:
        """Load new and changed adapters, and unload removed ones. An unreadable folder counts as unchanged.

        `models`: names that an adapter may not have.
        """
        try:
            found = {entry.name: read_stamp(Path(entry.path)) for entry in os.scandir(self._path) if _counts(entry)}
        except OSError as error:
            if (problem := str(error)) != self._problem:
                logger.error("the folder of adapters cannot be read, so its adapters stay loaded: %s", problem)
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
            stays = "; the previous one stays loaded" if name in self._loaded else ""
            logger.error("adapter '%s' cannot be loaded until its files change%s: %s", name, stays, error)
            return
        self._loaded.add(name)
        logger.info("adapter '%s' is loaded", name)


def _counts(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()
