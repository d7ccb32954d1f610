"""Qwen3.5 and 3.6 (dense), text config: Qwen3-Next with a plain MLP, and with tensors of delta nets of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmserve.models import qwen3_next
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family
from llmserve.models.mtp import with_drafter
from llmserve.models.spec import HfConfig

ROPE_KEYS = ("rope_parameters", "rope_scaling")
FOR_IMAGES = ("mrope_section", "mrope_interleaved")  # how positions in images turn; a text's are all the same


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(text_config(config))
    spec = qwen3_next.read(reader, "Qwen3_5ForCausalLM", joined=False)
    reader.finish()
    return spec


def text_config(config: HfConfig) -> Mapping[str, Any]:
    """Without what only images need."""
    found = dict(qwen3_next.with_defaults(config))
    for key in ROPE_KEYS:
        if isinstance(values := found.get(key), Mapping):
            found[key] = {name: value for name, value in values.items() if name not in FOR_IMAGES}
    return found


ARCHITECTURE = with_drafter(family("Qwen3_5ForCausalLM", "qwen3_5_text", from_hf, ignored=qwen3_next.OTHERS))
