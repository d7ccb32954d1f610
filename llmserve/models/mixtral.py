"""Mixtral: Mistral with a mixture of experts, whose weights sum to 1."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"num_key_value_heads": 8, "rope_theta": 1_000_000.0}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "MixtralForCausalLM")
    window = 0 if reader.get("sliding_window") is None else reader.integer("sliding_window")
    mixture = read_mixture(reader, renormalize=True, module="block_sparse_moe", names=("w1", "w3", "w2"))
    reader.finish()
    return replace(spec, windows=(window,) * spec.num_layers if window else (), mixture=mixture)


ARCHITECTURE = family("MixtralForCausalLM", "mixtral", from_hf)
