"""gpt-oss: attention sinks, a window in every second layer, experts with biases and a clamped activation.

Published checkpoints have experts in MXFP4; see `checkpoint/formats/mxfp4.py`.
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL, SLIDING, windows_by_type

DEFAULTS = {  # transformers' defaults
    "head_dim": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_theta": 150_000.0,
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "GptOssForCausalLM")
    usual = [FULL if layer % 2 else SLIDING for layer in range(spec.num_layers)]
    window = reader.integer("sliding_window")
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    reader.expect("swiglu_limit", 7.0)
    reader.expect("swiglu_alpha", 1.702)
    reader.expect("hidden_act", "silu")
    bias = reader.flag("attention_bias")
    mixture = read_mixture(
        reader,
        renormalize=True,
        router="router",
        stacked=("experts.gate_up_proj", "experts.down_proj"),
        is_transposed=True,
        in_turns=True,
        has_biases=True,
    )
    reader.finish()
    return replace(
        spec, windows=windows, qkv_bias=bias, output_bias=bias, sinks=True, activation="clamped", mixture=mixture
    )


ARCHITECTURE = family("GptOssForCausalLM", "gpt_oss", from_hf)
