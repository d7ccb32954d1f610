"""Nemotron-4, Minitron: layer norms with 1 + weight, half of each head rotated, a squared-ReLU MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "NemotronForCausalLM", partial=True, eps_key="norm_eps", plain_mlp="up_proj")
    bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    reader.finish()
    return replace(
        spec, layer_norm=True, norm_bias=True, norm_offset=1.0, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias
    )


ARCHITECTURE = family("NemotronForCausalLM", "nemotron", from_hf)
