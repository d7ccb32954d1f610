"""dots.llm1: Qwen3's attention and GLM-4.5's mixture."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.glm4_moe import read_glm_mixture
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, FULL, SLIDING, has_window, windows_by_type

MAX_WINDOW_LAYERS = 62  # transformers' default


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader({"n_shared_experts": 0} | dict(config))
    spec = read_family(reader, "Dots1ForCausalLM")
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    first = reader.integer("max_window_layers", MAX_WINDOW_LAYERS, minimum=0, maximum=MAX_COUNT)
    usual = [SLIDING if window and layer >= first else FULL for layer in range(spec.num_layers)]
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    bias = reader.flag("attention_bias")
    mixture = read_glm_mixture(reader, reader.integer("first_k_dense_replace", 0, minimum=0, maximum=spec.num_layers))
    reader.finish()
    return replace(spec, windows=windows, qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.HEADS, mixture=mixture)


ARCHITECTURE = family("Dots1ForCausalLM", "dots1", from_hf)
