"""Gemma 1: Llama with norms that multiply by 1 + weight, GELU, and embeddings times the root of the hidden size."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    """The activation is always GELU with tanh, as in transformers; the oldest configs have another value."""
    reader = ConfigReader(DEFAULTS | dict(config) | {"hidden_act": "gelu_pytorch_tanh"})
    spec = read_family(reader, "GemmaForCausalLM")
    bias = reader.flag("attention_bias")
    reader.expect("use_bidirectional_attention", False)
    reader.finish()
    return replace(spec, qkv_bias=bias, output_bias=bias, norm_offset=1.0, embed_scale=spec.hidden_size**0.5)


ARCHITECTURE = family("GemmaForCausalLM", "gemma", from_hf)
