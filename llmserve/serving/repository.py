"""Model repositories on disk: `<repository>/<model>/config.pbtxt` and `<model>/<version>/...`.

Reads names, versions and config texts; loads nothing. What is wrong with one model is a property of that model and
never hides the others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError, raise_problems
from llmserve.serving.config_text import parse_config_text

CONFIG_NAME = "config.pbtxt"
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model directory, as found."""

    name: str
    path: Path
    config: ModelConfig  # as written; partial when there are problems
    versions: tuple[int, ...]  # ascending
    problems: tuple[str, ...]  # why it cannot be loaded


def scan_repositories(repositories: Sequence[Path]) -> list[ModelSource]:
    """All models, by name. Raises `ModelConfigError` when a repository cannot be read or none holds a model."""
    raise_problems(
        ModelConfigError,
        "cannot read the model repository",
        [f"{path} is not a directory" for path in repositories if not path.is_dir()],
    )
    directories: dict[str, list[Path]] = {}
    for repository in repositories:
        for path in sorted(repository.iterdir()):
            if path.is_dir() and not path.name.startswith((".", "__")):
                directories.setdefault(path.name, []).append(path)
    if not directories:
        where = ", ".join(map(str, repositories)) or "no repository was given"
        raise ModelConfigError(f"no model found ({where}): expected <repository>/<model>/{CONFIG_NAME}")
    return [_read_model(name, paths) for name, paths in sorted(directories.items())]


def _read_model(name: str, paths: list[Path]) -> ModelSource:
    path = paths[0]
    if len(paths) > 1:
        places = ", ".join(str(place.parent) for place in paths)
        return ModelSource(name, path, ModelConfig(), (), (f"it is in several repositories: {places}; keep one",))
    config, problems = _read_config(path)
    if config.name and config.name != name:
        problems.append(f"{CONFIG_NAME} says name: '{config.name}', but the directory is '{name}'; they must be equal")
    config.name = name
    versions = _versions(path)
    if not versions:
        problems.append(f"no version: make a directory with a number as its name, such as {path.name}/1")
    return ModelSource(name, path, config, versions, tuple(problems))


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
