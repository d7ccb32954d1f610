"""Solar Open: Llama's attention, and GLM-4.5's mixture in every layer."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.glm4_moe import read_glm_mixture
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults
    "head_dim": 128,
    "num_key_value_heads": 8,
    "norm_topk_prob": True,
    "rope_theta": 1_000_000.0,
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | {"intermediate_size": config.get("moe_intermediate_size")} | dict(config))
    spec = read_family(reader, "SolarOpenForCausalLM")
    bias = reader.flag("attention_bias")
    mixture = read_glm_mixture(reader, 0)
    reader.finish()
    return replace(spec, qkv_bias=bias, mixture=mixture)


ARCHITECTURE = family("SolarOpenForCausalLM", "solar_open", from_hf)
