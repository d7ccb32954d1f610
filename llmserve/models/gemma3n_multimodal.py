"""Gemma 3n as published: the language model, without what reads images and sound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmserve.errors import CheckpointError
from llmserve.models import gemma3n, gemma4_multimodal
from llmserve.models.gemma3n import Gemma3nSpec
from llmserve.models.multimodal import OUTSIDE
from llmserve.models.spec import Architecture, HfConfig, Param, renamed


def from_hf(config: HfConfig) -> Gemma3nSpec:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config must be the config of the language model, got {text!r}")
    return gemma3n.from_hf({**text, **{key: config[key] for key in OUTSIDE if key in config}})


def params(spec: Gemma3nSpec) -> list[Param]:
    return [renamed(param, gemma4_multimodal.published) for param in gemma3n.params(spec)]


ARCHITECTURE: Architecture[Gemma3nSpec] = replace(
    gemma3n.ARCHITECTURE, names=("Gemma3nForConditionalGeneration",), model_type="gemma3n", from_hf=from_hf,
    params=params, ignored=gemma4_multimodal.outside(gemma3n.UNREAD),
)  # fmt: skip
