"""Gemma 4 as published: the language model, without what reads images and sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmserve.errors import CheckpointError
from llmserve.models import gemma4
from llmserve.models.gemma4 import Gemma4Spec
from llmserve.models.multimodal import OUTSIDE
from llmserve.models.spec import Architecture, HfConfig, Param, renamed

TOWERS = r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*"


def outside(unread: Sequence[str]) -> tuple[str, ...]:
    """Patterns of what is not the language model's, and of its own tensors that nothing reads."""
    return (TOWERS, *(pattern.replace(r"model\.", r"model\.language_model\.", 1) for pattern in unread))


def from_hf(config: HfConfig) -> Gemma4Spec:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config must be the config of the language model, got {text!r}")
    return gemma4.from_hf({**text, **{key: config[key] for key in OUTSIDE if key in config}})


def params(spec: Gemma4Spec) -> list[Param]:
    return [renamed(param, published) for param in gemma4.params(spec)]


def published(name: str) -> str:
    """The head is outside of the language model."""
    return name.replace("model.", "model.language_model.", 1)


ARCHITECTURE: Architecture[Gemma4Spec] = replace(
    gemma4.ARCHITECTURE, names=("Gemma4ForConditionalGeneration",), model_type="gemma4", from_hf=from_hf,
    params=params, ignored=outside(gemma4.BORROWED),
)  # fmt: skip
