"""OLMo 3: OLMo 2 with a window in three of four layers, in which the rotary embedding is never scaled."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.family import FamilySpec, HeadNorm, family
from llmserve.models.olmo2 import NORMS
from llmserve.models.rope import read_ropes
from llmserve.models.spec import HfConfig
from llmserve.models.windows import DEFAULT_WINDOW, FULL, SLIDING, has_window, types_by_pattern, windows_by_type

THETA = 500_000.0  # default
PATTERN = 4  # every fourth layer has full attention


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    sizes = read_decoder(reader, "Olmo3ForCausalLM")
    reader.expect("hidden_act", "silu")
    rope, local_rope = read_ropes(reader, sizes.head_dim, {FULL: ("rope_theta", THETA), SLIDING: ("rope_theta", THETA)})
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if has_window(reader) else 0
    usual = types_by_pattern(sizes.num_layers, PATTERN)
    windows = windows_by_type(reader, reader.get("layer_types", usual), sizes.num_layers, window)
    bias = reader.flag("attention_bias")
    reader.finish()
    return FamilySpec.extending(
        replace(sizes, rope=rope, windows=windows), local_rope=local_rope, norms=NORMS, head_norm=HeadNorm.WHOLE,
        qkv_bias=bias, output_bias=bias,
    )  # fmt: skip


ARCHITECTURE = family("Olmo3ForCausalLM", "olmo3", from_hf)
