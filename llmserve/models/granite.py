"""Granite 3: Llama with four multipliers.

The residual stream is stored divided by the residual multiplier, so each block adds its output unscaled. Norms cancel
the division, except in their epsilon, which is divided by the square of the multiplier.
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_granite(reader, "GraniteForCausalLM")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, mlp_bias=mlp_bias)


def read_granite(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that all Granite models share."""
    spec = read_family(reader, architecture)
    residual = reader.positive("residual_multiplier", 1.0)
    bias = reader.flag("attention_bias")
    return replace(
        spec,
        norm_eps=spec.norm_eps / residual**2,
        embed_scale=reader.positive("embedding_multiplier", 1.0) / residual,
        attention_scale=reader.positive("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.positive("logits_scaling", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )


ARCHITECTURE = family("GraniteForCausalLM", "granite", from_hf)
