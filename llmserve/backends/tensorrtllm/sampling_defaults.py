"""Sampling defaults of a checkpoint's generation_config.json. Text APIs use them for fields that a request omits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from llmserve.engine.directory.artifact import GENERATION_CONFIG_FILE
from llmserve.stages.files import read_json

NUMBERS = (int, float)
RANGES: Mapping[str, Callable[[float], bool]] = {  # with OpenAI's names
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and float(value).is_integer(),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 1e6,
}


def sampling_defaults(engine_dir: Path) -> dict[str, float]:
    """Unusable values are left out."""
    found = read_json(engine_dir / GENERATION_CONFIG_FILE)
    return {
        name: found[name] for name, fits in RANGES.items() if type(found.get(name)) in NUMBERS and fits(found[name])
    }
