"""Helium: Llama with an interleaved rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "HeliumForCausalLM")
    if spec.q_width != spec.hidden_size:
        reader.problems.append(f"num_attention_heads times head_dim must be hidden_size ({spec.hidden_size})")
    bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, interleaved=True, qkv_bias=bias, mlp_bias=mlp_bias)


ARCHITECTURE = family("HeliumForCausalLM", "helium", from_hf)
