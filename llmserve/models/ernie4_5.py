"""ERNIE 4.5 (dense): Llama with an interleaved rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "Ernie4_5ForCausalLM")
    bias = reader.flag("use_bias")
    reader.finish()
    return replace(spec, interleaved=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


ARCHITECTURE = family("Ernie4_5ForCausalLM", "ernie4_5", from_hf)
