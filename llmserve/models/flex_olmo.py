"""FlexOlmo: OLMo 2 with OLMoE's mixture."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.olmo2 import NORMS
from llmserve.models.spec import HfConfig

DEFAULTS = {"num_experts": 7, "num_experts_per_tok": 5, "rope_theta": 500_000.0}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "FlexOlmoForCausalLM")
    bias = reader.flag("attention_bias")
    mixture = read_mixture(reader)
    reader.finish()
    return replace(spec, norms=NORMS, head_norm=HeadNorm.WHOLE, qkv_bias=bias, output_bias=bias, mixture=mixture)


ARCHITECTURE = family("FlexOlmoForCausalLM", "flex_olmo", from_hf)
