"""Seed-OSS: Llama with its own head size, and three config keys for biases."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"head_dim": 128, "attention_bias": True}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "SeedOssForCausalLM")
    qkv_bias, output_bias = reader.flag("attention_bias"), reader.flag("attention_out_bias")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, qkv_bias=qkv_bias, output_bias=output_bias, mlp_bias=mlp_bias)


ARCHITECTURE = family("SeedOssForCausalLM", "seed_oss", from_hf)
