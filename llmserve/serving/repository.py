"""Model repositories on disk: `<repository>/<model>/config.pbtxt` and `<model>/<version>/...`.

Reads names, versions and config texts; loads nothing. What is wrong with one model is a property of that model and
never hides the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, ModelConfigError, raise_problems
from llmserve.serving.config_text import parse_config_text

CONFIG_NAME = "config.pbtxt"
Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # (file, size, time of its last change in ns)
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model directory, as found."""

    name: str
    path: Path
    config: ModelConfig  # as written; partial when there are problems
    versions: tuple[int, ...]  # ascending
    problems: tuple[str, ...]  # why it cannot be loaded
    stamp: Stamp = ()  # changes when a file does
    is_override: bool = False  # a client has sent the config
    is_temporary: bool = False  # and the files


@dataclass(frozen=True, slots=True)
class Listing:
    """What several repositories hold."""

    places: Mapping[str, tuple[Path, ...]]  # model -> its directories; more than one is an error of the model
    unreadable: Mapping[Path, str]  # repository -> why

    def require_readable(self) -> None:
        raise_problems(ModelConfigError, "cannot read the model repository", list(self.unreadable.values()))

    def require_models(self) -> None:
        if not self.places:
            raise ModelConfigError(f"no model found: expected <repository>/<model>/{CONFIG_NAME}")


def list_models(repositories: Sequence[Path]) -> Listing:
    places: dict[str, tuple[Path, ...]] = {}
    unreadable: dict[Path, str] = {}
    for repository in repositories:
        try:
            entries = [entry.name for entry in os.scandir(repository) if entry.is_dir()]
        except NotADirectoryError:
            unreadable[repository] = f"{repository} is not a directory"
        except FileNotFoundError:
            unreadable[repository] = f"{repository} is not a directory: there is nothing of that name"
        except OSError as error:
            unreadable[repository] = f"{repository} cannot be read: {error.strerror}"
        else:
            for name in entries:
                if not name.startswith((".", "__")):
                    places[name] = (*places.get(name, ()), repository / name)
    return Listing(dict(sorted(places.items())), unreadable)


def scan_repositories(repositories: Sequence[Path]) -> list[ModelSource]:
    """All models, by name. Raises `ModelConfigError` when a repository cannot be read or none holds a model."""
    listing = list_models(repositories)
    listing.require_readable()
    listing.require_models()
    return [read_model(name, paths) for name, paths in listing.places.items()]


def read_model(name: str, paths: Sequence[Path]) -> ModelSource:
    path = paths[0]
    if len(paths) > 1:
        places = ", ".join(str(place.parent) for place in paths)
        return ModelSource(name, path, ModelConfig(), (), (f"it is in several repositories: {places}; keep one",))
    stamp = read_stamp(path)  # first: what changes while it is read makes it differ from the next one
    config, problems = _read_config(path)
    if config.name and config.name != name:
        problems.append(f"{CONFIG_NAME} says name: '{config.name}', but the directory is '{name}'; they must be equal")
    config.name = name
    versions = _versions(path)
    if not versions:
        problems.append(f"no version: make a directory with a number as its name, such as {path.name}/1")
    return ModelSource(name, path, config, versions, tuple(problems), stamp)


def read_stamp(directory: Path) -> Stamp:
    """Sizes and times of a directory's files. What Python and editors leave beside them does not count."""
    return tuple(sorted(_file_stamps(directory, "")))


def _file_stamps(directory: Path, prefix: str) -> Iterator[tuple[str, int, int]]:
    try:
        entries = list(os.scandir(directory))
    except OSError:  # it has gone meanwhile, which is a change
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


def parse_config_json(name: str, text: str) -> ModelConfig:
    """A config as clients send it to override `config.pbtxt`. Raises `ModelConfigError`."""
    try:
        config: ModelConfig = json_format.Parse(text, ModelConfig())
    except (json_format.ParseError, json.JSONDecodeError, RecursionError) as error:
        raise ModelConfigError(f"the config override is not valid: {error}") from None
    if config.name and config.name != name:
        raise ModelConfigError(f"the config override says name: '{config.name}', but the model is '{name}'")
    config.name = name
    return config


def override_config(source: ModelSource, config: ModelConfig, *, is_temporary: bool) -> ModelSource:
    """The same files with another config; only what is wrong with the config itself is repaired by that."""
    kept = tuple(problem for problem in source.problems if not problem.startswith(CONFIG_NAME))
    return replace(source, config=config, problems=kept, is_override=True, is_temporary=is_temporary)


def write_override(name: str, files: Mapping[str, bytes], directory: Path) -> Path:
    """The model directory that a client has sent. Raises `InvalidArgument` for names that lead out of it."""
    target = directory / name
    target.mkdir(parents=True)
    try:
        for relative, content in files.items():
            path = target / relative
            if not relative or not path.resolve().is_relative_to(target.resolve()) or path.resolve() == target:
                raise InvalidArgument(f"override file '{relative}' is not a path inside the model directory")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        shutil.rmtree(directory)
        raise InvalidArgument(f"the override files of model '{name}' cannot be written: {error}") from None
    except InvalidArgument:
        shutil.rmtree(directory)
        raise
    return target


def _read_config(path: Path) -> tuple[ModelConfig, list[str]]:
    file = path / CONFIG_NAME
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ModelConfig(), [f"{CONFIG_NAME} is missing in {path}"]
    except (OSError, UnicodeDecodeError) as error:
        return ModelConfig(), [f"{CONFIG_NAME} cannot be read: {error}"]
    config, problems = parse_config_text(text)
    return config, [f"{CONFIG_NAME} {problem}" for problem in problems]


def _versions(path: Path) -> tuple[int, ...]:
    names = (entry.name for entry in path.iterdir() if entry.is_dir())
    return tuple(sorted(int(name) for name in names if _VERSION.fullmatch(name)))
