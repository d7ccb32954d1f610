"""Granite with windows: sinks in each head, and a theta for each layer, or no rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader, is_number
from llmserve.models.family import FamilySpec, family
from llmserve.models.granite import read_granite
from llmserve.models.rope import read_rope, rope_values
from llmserve.models.spec import HfConfig, Rope
from llmserve.models.windows import FULL, SLIDING, has_window, windows_by_type

DEFAULTS = {"num_key_value_heads": 4, "tie_word_embeddings": True}  # transformers' defaults
DEFAULT_WINDOW, PATTERN = 128, 4  # every fourth layer has full attention, beginning with the first


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_granite_swa(reader, "GraniteSWAForCausalLM")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, mlp_bias=mlp_bias)


def read_granite_swa(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that Granite-MoE with windows shares."""
    spec = read_granite(reader, architecture)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    usual = [SLIDING if layer % PATTERN else FULL for layer in range(spec.num_layers)]
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    return replace(spec, windows=windows, sinks=True, ropes=_ropes(reader, spec))


def _ropes(reader: ConfigReader, spec: FamilySpec) -> list[Rope | None]:
    """Embeddings by `layer_rope_theta`, with 0 for a layer without one. Empty: all layers have the same one."""
    thetas = reader.get("layer_rope_theta", [])
    is_list = isinstance(thetas, list) and len(thetas) in (0, spec.num_layers)
    if not is_list or not all(is_number(theta) and theta >= 0 for theta in thetas):
        reader.problems.append(f"layer_rope_theta must be a list of {spec.num_layers} numbers from 0, got {thetas!r}")
        return []
    values = rope_values(reader.config)
    found = {
        theta: read_rope(ConfigReader({"rope_scaling": values | {"rope_theta": theta}}), spec.head_dim)
        for theta in {*thetas} - {0}
    }
    return [found.get(theta) for theta in thetas]


ARCHITECTURE = family("GraniteSWAForCausalLM", "granite_swa", from_hf)
