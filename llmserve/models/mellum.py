"""Mellum 2: Qwen3's mixture, with windows in some layers and another rotary embedding in those."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.experts import read_dense_types, read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family
from llmserve.models.rope import read_ropes
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL, SLIDING, has_window, windows_by_type

DEFAULTS = {"head_dim": 128, "norm_topk_prob": True, "num_key_value_heads": 4}  # transformers' defaults
DEFAULT_WINDOW = 1024
THETAS = {FULL: ("rope_theta", 500_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}  # old key, default


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    sizes = read_decoder(reader, "MellumForCausalLM")
    reader.expect("hidden_act", "silu")
    rope, local_rope = read_ropes(reader, sizes.head_dim, THETAS)
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    usual = [FULL] * sizes.num_layers
    windows = windows_by_type(reader, reader.get("layer_types", usual), sizes.num_layers, window)
    bias = reader.flag("attention_bias")
    dense = read_dense_types(reader, sizes.num_layers)
    mixture = read_mixture(reader, expert_size="moe_intermediate_size", dense_layers=dense)
    reader.finish()
    return FamilySpec.extending(
        replace(sizes, rope=rope, windows=windows), local_rope=local_rope, head_norm=HeadNorm.HEADS, qkv_bias=bias,
        output_bias=bias, mixture=mixture,
    )  # fmt: skip


ARCHITECTURE = family("MellumForCausalLM", "mellum", from_hf, ignored=(r"mtp\..*",))
