"""Llama 4 (Scout, Maverick) as published: the language model, without the vision tower."""

from __future__ import annotations

from llmserve.models import llama4_text
from llmserve.models.multimodal import language_model

ARCHITECTURE = language_model(
    "Llama4ForConditionalGeneration",
    "llama4",
    {"llama4_text": llama4_text.from_hf},
    others=(r"vision_model\..*", r"multi_modal_projector\..*"),
)
