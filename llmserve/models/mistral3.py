"""Mistral 3 (Mistral Small 3.1 and later, Ministral 3 as published): the language model, without the vision tower."""

from __future__ import annotations

from llmserve.models import ministral3, mistral
from llmserve.models.multimodal import language_model

ARCHITECTURE = language_model(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    {"mistral": mistral.from_hf, "ministral3": ministral3.from_hf},
    others=(r"vision_tower\..*", r"multi_modal_projector\..*"),
)
