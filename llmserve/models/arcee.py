"""Arcee (AFM-4.5B): Llama with a squared-ReLU MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader({"hidden_act": "relu2"} | dict(config))
    spec = read_family(reader, "ArceeForCausalLM", plain_mlp="up_proj")
    bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


ARCHITECTURE = family("ArceeForCausalLM", "arcee", from_hf)
