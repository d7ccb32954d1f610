"""Qwen3.5 and 3.6 (dense) as published: the language model, without the vision tower and the drafting layer."""

from __future__ import annotations

from llmserve.models import qwen3_5_text, qwen3_next
from llmserve.models.mtp import with_drafter
from llmserve.models.multimodal import language_model

OTHERS = (r"model\.visual\..*", *qwen3_next.OTHERS)


def published(name: str) -> str:
    """The head is outside the language model's module."""
    return name.replace("model.", "model.language_model.", 1)


ARCHITECTURE = with_drafter(
    language_model(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {"qwen3_5_text": qwen3_5_text.from_hf},
        others=OTHERS,
        published=published,
    ),
    published,
)
