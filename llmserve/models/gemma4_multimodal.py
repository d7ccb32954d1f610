"""Gemma 4 as published: the language model, without the image and audio towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmserve.models import gemma4
from llmserve.models.multimodal import text_config
from llmserve.models.spec import Architecture, HfConfig, Param, Spec, renamed

TOWERS = r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*"


def as_published(text: Architecture[Spec], name: str, model_type: str, unread: Sequence[str]) -> Architecture[Spec]:
    """`text` in a checkpoint with towers. `unread`: patterns of its own unused tensors."""

    def from_hf(config: HfConfig) -> Spec:
        return text.from_hf(text_config(config))

    def params(spec: Spec) -> list[Param]:
        return [renamed(param, _published) for param in text.params(spec)]

    own = (pattern.replace(r"model\.", r"model\.language_model\.", 1) for pattern in unread)
    return replace(
        text, names=(name,), model_type=model_type, from_hf=from_hf, params=params, ignored=(TOWERS, *own)
    )  # fmt: skip


def _published(name: str) -> str:
    """The head is outside the language model's module."""
    return name.replace("model.", "model.language_model.", 1)


ARCHITECTURE = as_published(gemma4.ARCHITECTURE, "Gemma4ForConditionalGeneration", "gemma4", gemma4.BORROWED)
