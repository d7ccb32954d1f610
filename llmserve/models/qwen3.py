"""Qwen3 (dense): Llama with a norm on every head of q and k, its own head size, and Qwen2's sliding windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.graph import Graph, Value
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param
from llmserve.models.windows import read_windows

DEFAULT_HEAD_DIM = 128  # transformers' default where the key is missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Spec(DecoderSpec):
    attention_bias: bool  # of all four projections


def from_hf(config: HfConfig) -> Qwen3Spec:
    reader = ConfigReader({"head_dim": DEFAULT_HEAD_DIM} | dict(config))
    spec = read(reader, "Qwen3ForCausalLM")
    reader.finish()
    return spec


def read(reader: ConfigReader, architecture: str) -> Qwen3Spec:
    """What the mixture of experts has, too."""
    spec = read_decoder(reader, architecture, max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    windows = read_windows(reader, spec.num_layers)
    bias = reader.flag("attention_bias")
    reader.expect("mlp_bias", False)
    return Qwen3Spec.extending(replace(spec, rope=rope, windows=windows), attention_bias=bias)


def params(spec: Qwen3Spec) -> list[Param]:
    return weights.pre_norm_decoder(spec, partial(attention_params, spec), partial(weights.gated_mlp, spec))


def attention_params(spec: Qwen3Spec, layer: int) -> list[Param]:
    return [
        *weights.qkv(spec, layer, bias=spec.attention_bias),
        *weights.head_norms(spec, layer),
        *weights.output(spec, layer, bias=spec.attention_bias),
    ]


def forward(g: Graph, spec: Qwen3Spec) -> None:
    blocks.pre_norm_decoder(g, spec, partial(attention, g, spec), partial(blocks.gated_mlp, g, spec))


def attention(g: Graph, spec: Qwen3Spec, x: Value, layer: int) -> Value:
    q, k, v = blocks.qkv(g, spec, x, layer, bias=spec.attention_bias)
    q, k = blocks.turned(g, spec, spec.rope, *blocks.head_norms(g, spec, (q, k), layer))
    y = blocks.attention(g, spec, (q, k, v), layer)
    return blocks.output(g, spec, y, layer, bias=spec.attention_bias)


ARCHITECTURE = Architecture(("Qwen3ForCausalLM",), "qwen3", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
