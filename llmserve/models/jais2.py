"""Jais 2: Llama with layer norms and biases, and a squared-ReLU MLP without a gate."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"attention_bias": True, "hidden_act": "relu2", "layer_norm_eps": 1e-5, "mlp_bias": True}  # transformers'


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "Jais2ForCausalLM", eps_key="layer_norm_eps", plain_mlp="up_proj")
    bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    reader.finish()
    return replace(spec, layer_norm=True, norm_bias=True, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


ARCHITECTURE = family("Jais2ForCausalLM", "jais2", from_hf)
