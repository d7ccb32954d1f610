"""Mistral: Llama with one sliding window for every layer."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import decoder
from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.rope import STORED_FREQUENCIES, read_rope, scaled_positions
from llmserve.models.spec import Architecture, DecoderSpec, HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, has_window


def from_hf(config: HfConfig) -> DecoderSpec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "MistralForCausalLM", max_positions=scaled_positions(reader))
    rope = read_rope(reader, spec.head_dim)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    for key in ("attention_bias", "mlp_bias"):
        reader.expect(key, False)
    if reader.get("layer_types") is not None:
        reader.problems.append("layer_types is not supported for Mistral: its window is the same in every layer")
    reader.finish()
    windows = (window,) * spec.num_layers if window else ()
    return replace(spec, inv_freq=rope.inv_freq, rope_scale=rope.scale, windows=windows)


ARCHITECTURE = Architecture(from_hf, decoder.params, decoder.forward, ignored=(STORED_FREQUENCIES,))
