"""InternLM3: Llama with other config keys for biases."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "InternLM3ForCausalLM")
    bias = reader.flag("qkv_bias", reader.flag("attention_bias"))
    if bias != reader.flag("bias", reader.flag("mlp_bias")):
        reader.problems.append("qkv_bias and bias must be equal")  # as in transformers
    reader.finish()
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


ARCHITECTURE = family("InternLM3ForCausalLM", "internlm3", from_hf)
