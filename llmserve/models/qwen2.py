"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows in the upper layers where switched on."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import decoder
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig
from llmserve.models.windows import read_windows


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "Qwen2ForCausalLM", max_positions=scaled_positions(reader))
    rope = read_rope(reader, spec.head_dim)
    windows = read_windows(reader, spec.num_layers)
    for key in ("attention_bias", "mlp_bias"):  # keys of other architectures; here the bias is fixed
        reader.expect(key, False)
    reader.finish()
    return replace(spec, inv_freq=rope.inv_freq, rope_scale=rope.scale, windows=windows, qkv_bias=True)


ARCHITECTURE = Architecture(from_hf, decoder.params, decoder.forward, ignored=(STORED_FREQUENCIES,))
