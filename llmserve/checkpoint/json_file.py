"""Reads a checkpoint's JSON files: returns an object, or raises a CheckpointError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmserve.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_without_duplicates)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} must be a JSON object, not {type(content).__name__}")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return content
