"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all or some layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llmserve.models import blocks, qwen3, weights
from llmserve.models.config import ConfigReader
from llmserve.models.experts import Mixture, mixture_of_experts, mixture_params, read_dense_layers, read_mixture
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import STORED_FREQUENCIES
from llmserve.models.spec import Architecture, HfConfig, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeSpec(qwen3.Qwen3Spec):
    mixture: Mixture


def from_hf(config: HfConfig) -> Qwen3MoeSpec:
    reader = ConfigReader(config)
    spec = qwen3.read(reader, "Qwen3MoeForCausalLM")
    reader.expect("use_sliding_window", False)
    dense = read_dense_layers(reader, spec.num_layers)
    mixture = read_mixture(reader, expert_size="moe_intermediate_size", dense_layers=dense)
    reader.finish()
    return Qwen3MoeSpec.extending(spec, mixture=mixture)


def params(spec: Qwen3MoeSpec) -> list[Param]:
    def mlp(layer: int) -> list[Param]:
        if layer in spec.mixture.dense_layers:
            return weights.gated_mlp(spec, layer)
        return mixture_params(spec, spec.mixture, layer)

    return weights.pre_norm_decoder(spec, partial(qwen3.attention_params, spec), mlp)


def forward(g: Graph, spec: Qwen3MoeSpec) -> None:
    def mlp(x: Value, layer: int) -> Value:
        if layer in spec.mixture.dense_layers:
            return blocks.gated_mlp(g, spec, x, layer)
        return mixture_of_experts(g, spec.mixture, x, layer)

    blocks.pre_norm_decoder(g, spec, partial(qwen3.attention, g, spec), mlp)


ARCHITECTURE = Architecture(
    ("Qwen3MoeForCausalLM",), "qwen3_moe", from_hf, params, forward, ignored=(STORED_FREQUENCIES,)
)
