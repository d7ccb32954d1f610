"""Gemma 3, text only: Gemma 2 with norms of queries and keys, and another rotary embedding in window layers."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader, read_decoder
from llmserve.models.family import FamilySpec, HeadNorm, family
from llmserve.models.gemma2 import DEFAULTS, read_gemma
from llmserve.models.rope import read_ropes
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL, SLIDING

DEFAULT_PATTERN = 6  # every sixth layer has full attention
THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}  # old key, default


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    sizes = read_decoder(reader, "Gemma3ForCausalLM")
    pattern = reader.integer("sliding_window_pattern", DEFAULT_PATTERN)
    types = [SLIDING if (i + 1) % pattern else FULL for i in range(sizes.num_layers)]
    rope, local_rope = read_ropes(reader, sizes.head_dim, THETA)
    spec = read_gemma(reader, replace(sizes, rope=rope), types)
    reader.expect("attn_logit_softcapping", None)
    logit_soft_cap = reader.optional_positive("final_logit_softcapping")
    reader.finish()
    return replace(spec, head_norm=HeadNorm.HEADS, local_rope=local_rope, logit_soft_cap=logit_soft_cap)


ARCHITECTURE = family("Gemma3ForCausalLM", "gemma3_text", from_hf)
