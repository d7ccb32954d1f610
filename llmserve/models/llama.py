"""Llama 1, 2 and 3: rotary embedding with its scaling variants, grouped-query attention, optional biases."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "LlamaForCausalLM")
    bias = reader.flag("attention_bias")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


ARCHITECTURE = family("LlamaForCausalLM", "llama", from_hf)
