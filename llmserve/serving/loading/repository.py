"""Model repositories on disk: `<repository>/<model>/config.pbtxt` and `<model>/<version>/...`.

Reads names, versions and config texts; loads nothing. Problems of one model are stored with that model and never hide
the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError, raise_problems
from llmserve.serving.config.pbtxt import parse_config_text
from llmserve.serving.loading.object_store import is_url, open_object_store
from llmserve.serving.loading.sidecars import served_files

CONFIG_NAME = "config.pbtxt"
CONFIGS_FOLDER = "configs"
Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # (file, size, time of its last change in ns)
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


class Repository(Protocol):
    """A place with models. All calls block, and raise `OSError` if it cannot be read."""

    def list_names(self, *, cached: bool) -> list[str]:
        """`cached`: the names that are known without a remote call."""
        ...

    def fetch(self, name: str) -> Path:
        """A local directory with the model's files."""
        ...

    def discard(self, name: str, path: Path) -> None:
        """A directory that `fetch` has returned is no longer used."""
        ...

    def close(self) -> None: ...


class DirectoryRepository:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def list_names(self, *, cached: bool) -> list[str]:
        """Bytes that are not UTF-8 are escaped: no model is found by such a name, and the table shows that."""
        names = [entry.name for entry in os.scandir(self._path) if _is_directory(entry)]
        return [name.encode("utf-8", "backslashreplace").decode() for name in names]

    def fetch(self, name: str) -> Path:
        return self._path / name

    def discard(self, name: str, path: Path) -> None:
        pass

    def close(self) -> None:
        pass


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory or unreadable, such as a link into another user's folder. `read_model` reports that."""
    try:
        return entry.is_dir()
    except OSError:
        return True


def open_repository(location: Path | str) -> Repository:
    """Raises `InvalidArgument` for a URL that is not one of an object store."""
    if is_url(str(location)):
        return open_object_store(str(location))
    return DirectoryRepository(Path(location))


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model directory, as found."""

    name: str
    path: Path
    config: ModelConfig  # as written; partial when there are problems
    versions: tuple[int, ...]  # ascending
    problems: tuple[str, ...]  # why it cannot be loaded
    has_config: bool = True
    stamp: Stamp = ()  # changes when a file does
    repository: Repository | None = None  # None: a client has sent the files
    is_override: bool = False  # a client has sent the config
    parameters: Mapping[str, str] = field(default_factory=dict)  # override parameters of the config
    discard: Callable[[], None] | None = None  # call it in a thread when the files are no longer used

    @property
    def served_stamp(self) -> Stamp:
        """Changes with any served file. An engine's sidecars, such as the results of a gate, are not served."""
        served = served_files(file for file, *_ in self.stamp)
        return tuple(entry for entry in self.stamp if entry[0] in served)


@dataclass(frozen=True, slots=True)
class Listing:
    """The models in several repositories."""

    places: Mapping[str, tuple[Repository, ...]]  # by model; more than one is an error of the model
    unreadable: Mapping[Repository, str]  # the reason

    def require_readable(self) -> None:
        raise_problems(ModelConfigError, "cannot read the model repository", list(self.unreadable.values()))

    def require_models(self) -> None:
        if not self.places:
            raise ModelConfigError(f"no model found: expected <repository>/<model>/{CONFIG_NAME}")


def list_models(repositories: Sequence[Repository], *, cached: bool = False) -> Listing:
    places: dict[str, tuple[Repository, ...]] = {}
    unreadable: dict[Repository, str] = {}
    for repository in repositories:
        try:
            names = repository.list_names(cached=cached)
        except (FileNotFoundError, NotADirectoryError):
            unreadable[repository] = f"{repository} is not a directory"
        except OSError as error:
            unreadable[repository] = f"{repository} cannot be read: {error.strerror}"
        else:
            for name in names:
                if not name.startswith((".", "__")):
                    places[name] = (*places.get(name, ()), repository)
    return Listing(dict(sorted(places.items())), unreadable)


def read_model(name: str, repositories: Sequence[Repository], config_name: str = "") -> ModelSource:
    """Read a model. `config_name`: the name of the preferred file in `configs`."""
    repository = repositories[0]
    if len(repositories) > 1:
        places = ", ".join(map(str, repositories))
        problem = f"it is in several repositories: {places}; keep one"
        return ModelSource(name, Path(), ModelConfig(), (), (problem,), repository=repository)
    try:
        path = repository.fetch(name)
        source = read_directory(name, path, config_name)
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
        return ModelSource(name, Path(), ModelConfig(), (), (problem,), repository=repository)
    return replace(source, repository=repository, discard=partial(repository.discard, name, path))


def read_directory(name: str, path: Path, config_name: str = "") -> ModelSource:
    """Read a model's directory. Raises `OSError` if it does not exist."""
    stamp = read_stamp(path)  # first: then changes during the read make it differ from the next one
    preferred = path / CONFIGS_FOLDER / f"{config_name}.pbtxt"
    file = preferred if config_name and preferred.is_file() else path / CONFIG_NAME
    has_config = file.is_file()
    config, problems = _read_config(file) if has_config else (ModelConfig(), [])
    if name.startswith("-") or not name.isprintable():
        problems.append(
            f"{name!r} is not a valid model name: it must not begin with '-' and must have no control characters, "
            "such as line ends; rename its directory"
        )
    if config.name and config.name != name:
        problems.append(f"{file.name} says name: '{config.name}', but the directory is '{name}'; they must be equal")
    config.name = name
    versions = _versions(path)
    if not versions:
        problems.append(f"no version: create a directory whose name is a number, such as {path.name}/1")
    return ModelSource(name, path, config, versions, tuple(problems), has_config, stamp)


def read_again(source: ModelSource, config_name: str) -> ModelSource | None:
    """The model as it is now, if its files have changed since `source` was read; else None."""
    if source.is_override or not source.stamp or read_stamp(source.path) == source.stamp:
        return None
    try:
        newer = read_directory(source.name, source.path, config_name)
    except OSError:
        return None
    return replace(newer, repository=source.repository, discard=source.discard)


def read_stamp(directory: Path) -> Stamp:
    """Sizes and times of a directory's files, without those that Python and editors add."""
    return tuple(sorted(_file_stamps(directory, "")))


def _file_stamps(directory: Path, prefix: str) -> Iterator[tuple[str, int, int]]:
    try:
        entries = list(os.scandir(directory))
    except OSError:  # it was removed meanwhile, which is a change
        return
    for entry in entries:
        if entry.name.startswith((".", "__pycache__")):
            continue
        name = prefix + entry.name
        try:
            status = entry.stat()
            if entry.is_dir():
                yield name + "/", 0, 0
                yield from _file_stamps(Path(entry.path), name + "/")
            else:
                yield name, status.st_size, status.st_mtime_ns
        except OSError:
            continue


def _read_config(file: Path) -> tuple[ModelConfig, list[str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return ModelConfig(), [f"{file.name} cannot be read: {error}"]
    config, problems = parse_config_text(text)
    return config, [f"{file.name} {problem}" for problem in problems]


def _versions(path: Path) -> tuple[int, ...]:
    names = (entry.name for entry in path.iterdir() if entry.is_dir())
    return tuple(sorted(int(name) for name in names if _VERSION.fullmatch(name)))
