"""Ministral 8B: Mistral with windows in the layers that the config lists."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, FULL, SLIDING, has_window, windows_by_type


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "MinistralForCausalLM")
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    usual = [SLIDING if window else FULL] * spec.num_layers
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    for key in ("attention_bias", "mlp_bias"):
        reader.expect(key, False)
    reader.finish()
    return replace(spec, windows=windows)


ARCHITECTURE = family("MinistralForCausalLM", "ministral", from_hf)
