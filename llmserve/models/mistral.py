"""Mistral: Llama with one sliding window for every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.graph import Graph
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param
from llmserve.models.windows import DEFAULT_WINDOW, has_window


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "MistralForCausalLM", max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    for key in ("attention_bias", "mlp_bias"):
        reader.expect(key, False)
    if reader.get("layer_types") is not None:
        reader.problems.append("layer_types is not supported for Mistral: its window is the same in every layer")
    reader.finish()
    windows = (window,) * spec.num_layers if window else ()
    return replace(spec, rope=rope, windows=windows)


def params(spec: DecoderSpec) -> list[Param]:
    return weights.pre_norm_decoder(
        spec,
        lambda layer: [*weights.qkv(spec, layer), *weights.output(spec, layer)],
        partial(weights.gated_mlp, spec),
    )


def forward(g: Graph, spec: DecoderSpec) -> None:
    attention = partial(blocks.rotary_attention, g, spec)
    blocks.pre_norm_decoder(g, spec, attention, partial(blocks.gated_mlp, g, spec))


ARCHITECTURE = Architecture(("MistralForCausalLM",), "mistral", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
