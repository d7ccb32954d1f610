"""Llama 1, 2 and 3: rotary embedding with its scaling variants, grouped-query attention, optional biases."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import decoder
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "LlamaForCausalLM", max_positions=scaled_positions(reader))
    rope = read_rope(reader, spec.head_dim)
    bias = reader.flag("attention_bias")
    mlp_bias = reader.flag("mlp_bias")
    reader.finish()
    return replace(
        spec, inv_freq=rope.inv_freq, rope_scale=rope.scale, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias
    )


ARCHITECTURE = Architecture(from_hf, decoder.params, decoder.forward, ignored=(STORED_FREQUENCIES,))
