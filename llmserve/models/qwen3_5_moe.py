"""Qwen3.5 and 3.6 with experts as published: the language model, as in `qwen3_5.py`."""

from __future__ import annotations

from llmserve.models import qwen3_5, qwen3_5_moe_text
from llmserve.models.mtp import with_drafter
from llmserve.models.multimodal import language_model

ARCHITECTURE = with_drafter(
    language_model(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {"qwen3_5_moe_text": qwen3_5_moe_text.from_hf},
        others=qwen3_5.OTHERS,
        published=qwen3_5.published,
    ),
    qwen3_5.published,
)
