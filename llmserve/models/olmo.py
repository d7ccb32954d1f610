"""OLMo 1: Llama with layer norms that have no weights."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

EPS = {"layer_norm_eps": 1e-5}  # fixed in transformers; the config's is ignored


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(dict(config) | EPS)
    spec = read_family(reader, "OlmoForCausalLM", eps_key="layer_norm_eps")
    bias = reader.flag("attention_bias")
    reader.expect("clip_qkv", None)
    reader.finish()
    return replace(spec, layer_norm=True, norm_weights=False, qkv_bias=bias, output_bias=bias)


ARCHITECTURE = family("OlmoForCausalLM", "olmo", from_hf)
