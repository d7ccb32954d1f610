"""Bamba: Mamba in most layers; attention with half of each head rotated in the others."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import family
from llmserve.models.config import ConfigReader
from llmserve.models.delta_net import LINEAR, stateful_layers
from llmserve.models.family import FamilySpec, Norms, read_family
from llmserve.models.mamba import DEFAULTS, read_mamba
from llmserve.models.spec import Architecture, HfConfig, Param, renamed
from llmserve.models.windows import FULL

TURNED = 0.5  # the rotated part of each head, in every config
NORMS = Norms("input_layernorm", "", "pre_ff_layernorm", "")


def from_hf(config: HfConfig) -> FamilySpec:
    given = {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(DEFAULTS | {"num_key_value_heads": 8} | given | {"partial_rotary_factor": TURNED})
    spec = read_family(reader, "BambaForCausalLM", partial=True)
    listed = reader.get("attn_layer_indices", [])
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        reader.problems.append(f"attn_layer_indices must be a list of layers, got {listed!r}")
        listed = range(spec.num_layers)
    types = [FULL if layer in listed else LINEAR for layer in range(spec.num_layers)]
    inner = reader.integer("mamba_expand") * spec.hidden_size
    bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    mamba = read_mamba(reader, spec.norm_eps, inner=inner)
    layers = stateful_layers(reader, types, spec.num_layers)
    reader.finish()
    return replace(
        spec, norms=NORMS, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, mlp_module="feed_forward",
        stateful_layers=layers, mixer=mamba,
    )  # fmt: skip


def params(spec: FamilySpec) -> list[Param]:
    return [renamed(param, published) for param in family.params(spec)]


def published(name: str) -> str:
    return name.replace("model.norm.", "model.final_layernorm.")


ARCHITECTURE: Architecture[FamilySpec] = replace(family.family("BambaForCausalLM", "bamba", from_hf), params=params)
