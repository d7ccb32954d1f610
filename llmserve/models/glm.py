"""GLM-4 (2024): Llama with half of each head rotated, in interleaved pairs, and gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_glm(reader, "GlmForCausalLM")
    reader.finish()
    return spec


def read_glm(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that GLM-4-0414 shares."""
    spec = read_family(reader, architecture, partial=True)
    bias = reader.flag("attention_bias")
    return replace(spec, qkv_bias=bias, fused_mlp="gate_up_proj", interleaved=True)


ARCHITECTURE = family("GlmForCausalLM", "glm", from_hf)
