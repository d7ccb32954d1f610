"""Gemma 3 (4B and larger) as published: the language model, without the vision tower."""

from __future__ import annotations

from llmserve.models import gemma3
from llmserve.models.family import FamilySpec
from llmserve.models.multimodal import language_model
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults; published configs omit most of them
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
}  # fmt: skip


def from_hf(config: HfConfig) -> FamilySpec:
    return gemma3.from_hf(DEFAULTS | dict(config))


ARCHITECTURE = language_model(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    {"gemma3_text": from_hf},
    others=(r"vision_tower\..*", r"multi_modal_projector\..*"),
)
