"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and sliding windows in the upper layers if enabled."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import read_windows


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "Qwen2ForCausalLM")
    windows = read_windows(reader, spec.num_layers)
    for key in ("attention_bias", "mlp_bias"):  # keys of other architectures; here the bias is fixed
        reader.expect(key, False)
    reader.finish()
    return replace(spec, windows=windows, qkv_bias=True)


ARCHITECTURE = family("Qwen2ForCausalLM", "qwen2", from_hf)
