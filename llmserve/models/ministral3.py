"""Ministral 3: Mistral with queries that grow with their position, by keys of the rope parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.rope import rope_key, rope_values
from llmserve.models.spec import HfConfig, PositionScale

STRENGTH, POSITIONS = "llama_4_scaling_beta", "max_position_embeddings"  # rope keys of this family only
DEFAULT_ROPE = {  # transformers' defaults
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, STRENGTH: 0.1,
}  # fmt: skip


def from_hf(config: HfConfig) -> FamilySpec:
    key = rope_key(config)
    config = {**config, key: config.get(key) or DEFAULT_ROPE}
    strength = _taken(config, key, STRENGTH)
    reader = ConfigReader(config)
    spec = read_family(reader, "Ministral3ForCausalLM")
    window = reader.integer("sliding_window", 0, minimum=0)
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    grown = ConfigReader({STRENGTH: strength, **rope_values(config)})
    scale = PositionScale(grown.positive(STRENGTH), grown.integer("original_max_position_embeddings"))
    reader.problems += [f"rope parameter {problem}" for problem in grown.problems]
    reader.finish()
    return replace(spec, windows=(window,) * spec.num_layers if window else (), position_scale=scale)


def _taken(config: dict[str, Any], rope: str, key: str) -> Any:
    """Return rope parameter `key`, and remove this family's own rope keys from `config`."""
    given = config[rope]
    if not isinstance(given, dict):
        return None
    config[rope] = {name: value for name, value in given.items() if name not in (STRENGTH, POSITIONS)}
    return given.get(key)


ARCHITECTURE = family("Ministral3ForCausalLM", "ministral3", from_hf)
