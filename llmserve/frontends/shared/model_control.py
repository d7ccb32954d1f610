"""Parameter names and errors for loading and unloading models, for both protocols."""

from __future__ import annotations

from typing import NoReturn

from llmserve.errors import InvalidArgument, Unsupported

CONFIG_PARAMETER = "config"  # a model config as JSON, instead of the one in the repository
FILE_PREFIX = "file:"  # file:<path in the model's directory>
UNLOAD_DEPENDENTS = "unload_dependents"


def check_repository_name(name: str) -> None:
    """Raises `Unsupported` for any name: a server's repositories have no names."""
    if name:
        raise Unsupported("'repository_name' specification is not supported")


def unknown_load_parameter(name: str) -> NoReturn:
    raise InvalidArgument(
        f"unrecognized load parameter '{name}'. Known: '{CONFIG_PARAMETER}' and '{FILE_PREFIX}<path>'"
    )
