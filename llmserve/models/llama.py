"""Llama 1, 2 and 3: rotary embedding with its scaling variants, grouped-query attention, optional biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.graph import Graph
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec(DecoderSpec):
    attention_bias: bool  # of all four projections
    mlp_bias: bool


def from_hf(config: HfConfig) -> LlamaSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "LlamaForCausalLM", max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    bias = reader.flag("attention_bias")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return LlamaSpec.extending(replace(spec, rope=rope), attention_bias=bias, mlp_bias=mlp_bias)


def params(spec: LlamaSpec) -> list[Param]:
    bias = spec.attention_bias
    return weights.pre_norm_decoder(
        spec,
        lambda layer: [*weights.qkv(spec, layer, bias=bias), *weights.output(spec, layer, bias=bias)],
        partial(weights.gated_mlp, spec, bias=spec.mlp_bias),
    )


def forward(g: Graph, spec: LlamaSpec) -> None:
    bias = spec.attention_bias
    attention = partial(blocks.rotary_attention, g, spec, qkv_bias=bias, output_bias=bias)
    blocks.pre_norm_decoder(g, spec, attention, partial(blocks.gated_mlp, g, spec, bias=spec.mlp_bias))


ARCHITECTURE = Architecture(("LlamaForCausalLM",), "llama", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
