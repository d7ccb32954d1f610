"""Recipes: a build's flags in a YAML file. A flag on the command line overrides the same key of the recipe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.builder.options import BuildOptions, declared_options
from llmserve.errors import NotFound, RecipeError, raise_problems
from llmserve.strict_yaml import read_yaml

CONVERTED_FILE = "recipe.yaml"  # in a folder written by `llmserve convert-checkpoint`
PATH_KEYS = ("checkpoint", "output_dir")
KEY_TYPES: Mapping[str, type] = {
    **{name: option.type for name, option in declared_options().items()},
    **dict.fromkeys(PATH_KEYS, str),
}
TYPE_NAMES = {int: "an integer", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The contents of a recipe; missing keys are None, or absent from `options`."""

    checkpoint: Path | None = None
    output_dir: Path | None = None
    options: Mapping[str, Any] | None = None

    def resolve(self, flags: Mapping[str, Any]) -> BuildOptions:
        """Defaults, overridden by the recipe, overridden by every flag that is not None."""
        given = {name: value for name, value in flags.items() if value is not None}
        return BuildOptions.from_flat({**(self.options or {}), **given})


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe. Its paths are relative to its own folder. `RecipeError` lists every problem."""
    try:
        content = read_yaml(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"recipe {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path} must consist of `key: value` lines; keys are {', '.join(KEY_TYPES)}")
    problems = [text for key, value in content.items() if (text := _problem(key, value))]
    raise_problems(RecipeError, f"{path} is not a valid recipe", problems)
    paths = {key: path.parent / content.pop(key) for key in PATH_KEYS if key in content}
    named = {key: str(path.parent / value) for key, value in content.items() if value and _is_path(key)}
    return Recipe(**paths, options={**content, **named})


def _is_path(key: str) -> bool:
    return declared_options()[key].flag.is_path


def _problem(key: Any, value: Any) -> str:
    """The problem with one entry, or an empty string."""
    if key not in KEY_TYPES:
        close = difflib.get_close_matches(str(key).replace("-", "_"), KEY_TYPES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"keys are {', '.join(KEY_TYPES)}"
        return f"unknown key {key!r}; {hint}"
    if type(value) is not KEY_TYPES[key]:
        return f"{key} must be {TYPE_NAMES[KEY_TYPES[key]]}, got {value!r}"
    return ""
