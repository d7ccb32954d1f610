"""EXAONE 4: norms after the blocks and on heads. If layers have windows, only these have a rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.olmo2 import NORMS
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, FULL, SLIDING, has_window, types_by_pattern, windows_by_type

DEFAULT_PATTERN = 4  # every fourth layer has full attention


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_exaone(reader, "Exaone4ForCausalLM")
    reader.finish()
    return replace(spec, norms=NORMS)


def read_exaone(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that EXAONE-MoE shares."""
    spec = read_family(reader, architecture)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    windows = windows_by_type(reader, _layer_types(reader, spec.num_layers, window), spec.num_layers, window)
    unturned = [layer for layer in range(spec.num_layers) if window and not (windows and windows[layer])]
    return replace(spec, windows=windows, unturned=tuple(unturned), head_norm=HeadNorm.HEADS)


def _layer_types(reader: ConfigReader, num_layers: int, window: int) -> object:
    """Types from `layer_types`, else from `sliding_window_pattern`: a number, or letters as in "LLLG"."""
    pattern = reader.get("sliding_window_pattern", DEFAULT_PATTERN)
    if reader.get("layer_types") is not None or not window:
        return reader.get("layer_types", [FULL] * num_layers)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # the last layer is always full
        kinds = [pattern[layer % len(pattern)] for layer in range(num_layers - 1)] + ["G"]
        return [SLIDING if kind == "L" else FULL for kind in kinds]
    every = reader.integer("sliding_window_pattern", DEFAULT_PATTERN)
    return types_by_pattern(num_layers, every)


ARCHITECTURE = family("Exaone4ForCausalLM", "exaone4", from_hf)
