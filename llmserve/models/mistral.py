"""Mistral: Llama with one sliding window for every layer."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, has_window


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "MistralForCausalLM")
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    for key in ("attention_bias", "mlp_bias"):
        reader.expect(key, False)
    if reader.get("layer_types") is not None:
        reader.problems.append("layer_types is not supported for Mistral: its window is the same in every layer")
    reader.finish()
    return replace(spec, windows=(window,) * spec.num_layers if window else ())


ARCHITECTURE = family("MistralForCausalLM", "mistral", from_hf)
