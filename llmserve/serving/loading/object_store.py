"""Model repositories in object stores: s3://, gs://, as:// (Azure), oss://, through fsspec.

A model is copied to a local directory before it is read. Each state of it gets its own directory, so that a served
model keeps its files while the next state is loaded; unchanged files are linked, not copied again. An engine's
sidecars, such as the results of a gate, do not make a new state: they are replaced in place.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from llmserve.errors import InvalidArgument
from llmserve.owned_directory import OwnedDirectory, new_temporary_directory
from llmserve.serving.loading.sidecars import served_files

SCHEMES = {"s3": "s3", "gs": "gs", "as": "abfs", "oss": "oss"}  # of a URL -> fsspec's name
TOKENS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "created", "size")
_S3_ENDPOINT = re.compile(r"(?P<url>(?:https?://)?[^/:]+:\d+)/(?P<path>.*)")


def is_url(location: str) -> bool:
    return "://" in location


@dataclass(slots=True)
class _Copy:
    tokens: Mapping[str, str]  # file -> a token that changes with it
    path: Path
    is_unused: bool = False


class ObjectStoreRepository:
    """`files` is an fsspec file system, `root` the repository's path in it."""

    def __init__(self, location: str, files: Any, root: str) -> None:
        self._location = location
        self._files = files
        self._root = root.strip("/")
        self._names: list[str] = []
        self._cache: OwnedDirectory | None = None
        self._copies: dict[str, _Copy] = {}  # the newest copy of each model
        self._copy_ids = count()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self._location

    def list_names(self, *, cached: bool) -> list[str]:
        """The names of the models. Raises `OSError`. `cached`: those found last, without blocking."""
        if not cached:
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(self._root, detail=True)
            except Exception as error:  # border: every store has errors of its own
                raise OSError(0, _describe(error)) from error
            paths = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
            self._names = [path.rpartition("/")[2] for path in paths]
        return self._names

    def fetch(self, name: str) -> Path:
        """A local directory with the current files; the same directory as long as no served file changes."""
        with self._lock:
            try:
                return self._fetch(name)
            except OSError:
                raise
            except Exception as error:  # border: every store has errors of its own
                raise OSError(0, f"{self._location}/{name}: {_describe(error)}") from error

    def discard(self, name: str, path: Path) -> None:
        """Delete a copy that is no longer used. The newest one is kept for the next load."""
        with self._lock:
            newest = self._copies.get(name)
            if newest is not None and newest.path == path:
                newest.is_unused = True
            else:
                shutil.rmtree(path.parent, ignore_errors=True)

    def close(self) -> None:
        if self._cache is not None:
            self._cache.remove()

    def _fetch(self, name: str) -> Path:
        prefix = f"{self._root}/{name}/"
        self._files.invalidate_cache()
        found = self._files.find(prefix, detail=True)
        tokens = {
            path.lstrip("/").removeprefix(prefix): _token(info) for path, info in found.items() if path[-1] != "/"
        }
        before = self._copies.get(name)
        if before is not None and _served(before.tokens) == _served(tokens):
            self._replace_sidecars(prefix, tokens, before)
            before.is_unused = False
            return before.path
        copy = _Copy(tokens, self._new_directory() / name)
        for relative in tokens:
            self._copy_file(prefix, relative, copy, before)
        copy.path.mkdir(parents=True, exist_ok=True)
        self._copies[name] = copy
        if before is not None and before.is_unused:
            shutil.rmtree(before.path.parent, ignore_errors=True)
        return copy.path

    def _replace_sidecars(self, prefix: str, tokens: Mapping[str, str], copy: _Copy) -> None:
        """Replace each file atomically, because it may be read meanwhile."""
        for relative in copy.tokens.keys() - tokens.keys():
            (copy.path / relative).unlink(missing_ok=True)
        for relative, token in tokens.items():
            if copy.tokens.get(relative) != token:
                path = copy.path / relative
                aside = path.with_name(f".{path.name}")
                self._files.get_file(prefix + relative, str(aside))
                os.replace(aside, path)
        copy.tokens = tokens

    def _copy_file(self, prefix: str, relative: str, copy: _Copy, before: _Copy | None) -> None:
        path = copy.path / relative
        if not path.resolve().is_relative_to(copy.path.resolve()):
            raise OSError(0, f"{self._location} has an object whose name leads out of its model: '{relative}'")
        path.parent.mkdir(parents=True, exist_ok=True)
        if before is not None and before.tokens.get(relative) == copy.tokens[relative]:
            os.link(before.path / relative, path)
        else:
            self._files.get_file(prefix + relative, str(path))

    def _new_directory(self) -> Path:
        if self._cache is None:
            self._cache = new_temporary_directory("llmserve-repository-")
        return Path(self._cache.path, str(next(self._copy_ids)))


def open_object_store(location: str) -> ObjectStoreRepository:
    """Raises `InvalidArgument` for unsupported URLs and missing packages. Does not connect to the store."""
    scheme, _, rest = location.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise InvalidArgument(f"model repository {location}: known URLs are {known}; anything else is a directory")
    root, options = rest, {}
    if scheme == "s3" and (match := _S3_ENDPOINT.fullmatch(rest)):
        endpoint, root = match["url"], match["path"]
        options["endpoint_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    if scheme == "as":
        account, _, root = rest.partition("/")
        options["account_name"] = account.partition(".")[0]
        if key := os.environ.get("AZURE_STORAGE_KEY"):
            options["account_key"] = key
    if not root.strip("/"):
        raise InvalidArgument(f"model repository {location}: the URL names no bucket")
    try:
        import fsspec

        files = fsspec.filesystem(SCHEMES[scheme], use_listings_cache=False, **options)
    except ImportError as error:
        raise InvalidArgument(
            f"model repository {location}: {error}; install it: pip install 'llmserve[{scheme}]'"
        ) from error
    return ObjectStoreRepository(location, files, root)


def _served(tokens: Mapping[str, str]) -> dict[str, str]:
    return {file: tokens[file] for file in served_files(tokens)}


def _token(info: Mapping[str, Any]) -> str:
    """A token that changes with the object."""
    return hashlib.sha256(repr([(key, str(info[key])) for key in TOKENS if key in info]).encode()).hexdigest()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
