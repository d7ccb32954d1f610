"""Overrides that a client sends to load a model with: another config, and other files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, ModelConfigError, raise_problems
from llmserve.serving.config.files import is_inside
from llmserve.serving.loading.repository import ModelSource


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


def override_config(source: ModelSource, config: ModelConfig) -> ModelSource:
    """The source with another config. This removes the problems of the old config, but no others."""
    kept = tuple(problem for problem in source.problems if ".pbtxt " not in problem)
    return replace(source, config=config, problems=kept, is_override=True, has_config=True)


def write_override(name: str, files: Mapping[str, bytes], directory: Path) -> Path:
    """Write the model directory that a client has sent. Raises `InvalidArgument` for names that lead out of it."""
    target = directory / name
    wrong = [relative for relative in files if not is_inside(relative)]
    if not is_inside(name) or len(PurePosixPath(name).parts) > 1:
        raise InvalidArgument(f"'{name}' is not the name of a model: it must be that of a directory")
    raise_problems(
        InvalidArgument,
        f"failed to load '{name}'",
        [f"override file '{relative}' is not a path inside the model directory" for relative in wrong],
    )
    try:
        target.mkdir(parents=True)
        for relative, content in files.items():
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise InvalidArgument(f"the override files of model '{name}' cannot be written: {error.strerror}") from None
    return target
