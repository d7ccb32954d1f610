"""Qwen3-Next: gated delta nets in three of four layers, attention with gated heads in the fourth, experts.

Qwen3.5 uses its functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmserve.models import delta_net
from llmserve.models.config import ConfigReader
from llmserve.models.delta_net import read_delta_net, read_stateful_layers
from llmserve.models.experts import Mixture, read_dense_layers, read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.mtp import with_drafter
from llmserve.models.spec import HfConfig

DEFAULTS = delta_net.DEFAULTS | {"head_dim": 256, "partial_rotary_factor": 0.25}  # transformers' defaults
EXPERTS = {  # transformers' defaults
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
}  # fmt: skip
OTHERS = (r"mtp\..*",)  # tensors of the layer that drafts tokens


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(EXPERTS | with_defaults(config))
    spec = read(reader, "Qwen3NextForCausalLM", joined=True)
    mixture = None
    if reader.get("num_experts") != 0:
        mixture = read_experts(reader, dense_layers=read_dense_layers(reader, spec.num_layers))
    reader.finish()
    return replace(spec, mixture=mixture)


def with_defaults(config: HfConfig) -> dict[str, Any]:
    return DEFAULTS | {key: value for key, value in config.items() if value is not None}


def read(reader: ConfigReader, architecture: str, *, joined: bool) -> FamilySpec:
    """Read the keys that Qwen3.5 shares. `joined`: as `DeltaNet.joined`."""
    spec = read_family(reader, architecture, partial=True)
    reader.expect("hidden_act", "silu", "swish")
    bias = reader.flag("attention_bias")
    layers = read_stateful_layers(reader, spec.num_layers)
    return replace(
        spec, stateful_layers=layers, mixer=read_delta_net(reader, joined=joined), gated_heads=True,
        head_norm=HeadNorm.HEADS, norm_offset=1.0, qkv_bias=bias, output_bias=bias,
    )  # fmt: skip


def read_experts(reader: ConfigReader, **own: Any) -> Mixture:
    return read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        shared_size=reader.integer("shared_expert_intermediate_size"),
        shared="mlp.shared_expert",
        shared_gate="shared_expert_gate",
        **own,
    )


ARCHITECTURE = with_drafter(family("Qwen3NextForCausalLM", "qwen3_next", from_hf, ignored=OTHERS))
