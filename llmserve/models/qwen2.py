"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows in the upper layers where switched on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from llmserve.models import blocks, weights
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.graph import Graph
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig, Param
from llmserve.models.windows import read_windows


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "Qwen2ForCausalLM", max_positions=scaled_positions(reader))
    reader.expect("hidden_act", "silu")
    rope = read_rope(reader, spec.head_dim)
    windows = read_windows(reader, spec.num_layers)
    for key in ("attention_bias", "mlp_bias"):  # keys of other architectures; here the bias is fixed
        reader.expect(key, False)
    reader.finish()
    return replace(spec, rope=rope, windows=windows)


def params(spec: DecoderSpec) -> list[Param]:
    return weights.pre_norm_decoder(
        spec,
        lambda layer: [*weights.qkv(spec, layer, bias=True), *weights.output(spec, layer)],
        partial(weights.gated_mlp, spec),
    )


def forward(g: Graph, spec: DecoderSpec) -> None:
    attention = partial(blocks.rotary_attention, g, spec, qkv_bias=True)
    blocks.pre_norm_decoder(g, spec, attention, partial(blocks.gated_mlp, g, spec))


ARCHITECTURE = Architecture(("Qwen2ForCausalLM",), "qwen2", from_hf, params, forward, ignored=(STORED_FREQUENCIES,))
