"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2 with a mixture of experts, and one that every token goes through.

The output of that shared expert is multiplied with the sigmoid of a number that the token gives it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.experts import Mixture, mixture_of_experts, mixture_params, read_dense_layers, read_mixture
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param
from llmserve.models.windows import read_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeSpec(DecoderSpec):
    qkv_bias: bool
    mixture: Mixture
    shared_size: int  # inner width of the shared expert

    @property
    def shared(self) -> DecoderSpec:
        """The sizes of the shared expert."""
        return replace(self, intermediate_size=self.shared_size)


def from_hf(config: HfConfig) -> Qwen2MoeSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "Qwen2MoeForCausalLM", max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    windows = read_windows(reader, spec.num_layers)
    dense = read_dense_layers(reader, spec.num_layers)
    mixture = read_mixture(reader, expert_size="moe_intermediate_size", dense_layers=dense)
    shared_size, qkv_bias = reader.integer("shared_expert_intermediate_size"), reader.flag("qkv_bias", True)
    reader.finish()
    return Qwen2MoeSpec.extending(
        replace(spec, rope=rope, windows=windows), qkv_bias=qkv_bias, mixture=mixture, shared_size=shared_size
    )


def params(spec: Qwen2MoeSpec) -> list[Param]:
    def mlp(layer: int) -> list[Param]:
        if layer in spec.mixture.dense_layers:
            return weights.gated_mlp(spec, layer)
        gate = f"{weights.layer_source(layer)}.mlp.shared_expert_gate.weight"
        return [
            *mixture_params(spec, spec.mixture, layer),
            *weights.gated_mlp(spec.shared, layer, module="mlp.shared_expert"),
            weights.copied(f"layers.{layer}.mlp.gate", gate, (1, spec.hidden_size)),
        ]

    return weights.pre_norm_decoder(
        spec, lambda layer: [*weights.qkv(spec, layer, bias=spec.qkv_bias), *weights.output(spec, layer)], mlp
    )


def forward(g: Graph, spec: Qwen2MoeSpec) -> None:
    def mlp(x: Value, layer: int) -> Value:
        if layer in spec.mixture.dense_layers:
            return blocks.gated_mlp(g, spec, x, layer)
        y = mixture_of_experts(g, spec.mixture, x, layer)
        gate = g.linear(x, f"layers.{layer}.mlp.gate", 1)
        return g.add(y, g.sigmoid_gate(blocks.gated_mlp(g, spec.shared, x, layer), gate))

    blocks.pre_norm_decoder(g, spec, partial(blocks.rotary_attention, g, spec, qkv_bias=spec.qkv_bias), mlp)


ARCHITECTURE = Architecture(
    ("Qwen2MoeForCausalLM",), "qwen2_moe", from_hf, params, forward, ignored=(STORED_FREQUENCIES,)
)
