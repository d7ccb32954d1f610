"""Hunyuan (dense): Llama with norms of heads after the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.rope import rope_key
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(with_own_rope(config))
    spec = read_hunyuan(reader, "HunYuanDenseV1ForCausalLM")
    reader.finish()
    return spec


def with_own_rope(config: HfConfig) -> HfConfig:
    """Rename the type `dynamic` of published configs: with `alpha`, it does not depend on the length."""
    key = rope_key(config)
    given = config.get(key)
    if not isinstance(given, Mapping) or not given.get("alpha"):
        return config
    kind = given.get("rope_type", given.get("type"))
    return dict(config) | {key: dict(given) | {"rope_type": "ntk_alpha" if kind == "dynamic" else kind}}


def read_hunyuan(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that Hunyuan-MoE shares."""
    spec = read_family(reader, architecture)
    bias = reader.flag("attention_bias")
    modules = ("query_layernorm", "key_layernorm")
    return replace(spec, head_norm=HeadNorm.TURNED_HEADS, head_norm_modules=modules, qkv_bias=bias, output_bias=bias)


ARCHITECTURE = family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", from_hf)
