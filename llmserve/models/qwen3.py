"""Qwen3 (dense): Llama with a norm on every head of q and k, its own head size, and Qwen2's sliding windows."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import decoder
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig
from llmserve.models.windows import read_windows

DEFAULT_HEAD_DIM = 128  # transformers' default where the key is missing


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader({"head_dim": DEFAULT_HEAD_DIM} | dict(config))
    spec = read_decoder(reader, "Qwen3ForCausalLM", max_positions=scaled_positions(reader))
    rope = read_rope(reader, spec.head_dim)
    windows = read_windows(reader, spec.num_layers)
    bias = reader.flag("attention_bias")
    reader.expect("mlp_bias", False)
    reader.finish()
    return replace(
        spec,
        inv_freq=rope.inv_freq,
        rope_scale=rope.scale,
        windows=windows,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
    )


ARCHITECTURE = Architecture(from_hf, decoder.params, decoder.forward, ignored=(STORED_FREQUENCIES,))
