"""Cohere (Command R, Command R+, Aya): Cohere 2 with full attention and rotary embedding in every layer."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.cohere2 import DEFAULTS, read_cohere
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, family
from llmserve.models.spec import HfConfig

DEFAULT_THETA = 500_000.0  # transformers' default


def from_hf(config: HfConfig) -> FamilySpec:
    """Command R was trained for `model_max_length`; its `max_position_embeddings` is smaller."""
    limit = config.get("model_max_length") or config.get("max_position_embeddings")
    changed = dict(config) | {"max_position_embeddings": limit}
    reader = ConfigReader(DEFAULTS | {"rope_theta": DEFAULT_THETA} | changed)
    spec = read_cohere(reader, "CohereForCausalLM")
    has_norms = reader.flag("use_qk_norm")
    reader.finish()
    return replace(spec, head_norm=HeadNorm.OWN_ROWS if has_norms else HeadNorm.NONE)


ARCHITECTURE = family("CohereForCausalLM", "cohere", from_hf)
