"""Qwen3.5 and 3.6 (dense), text config: Qwen3-Next without experts, and with other tensors for delta nets."""

from __future__ import annotations

from llmserve.models import qwen3_next
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family
from llmserve.models.mtp import with_drafter
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(qwen3_next.with_defaults(config))
    spec = qwen3_next.read(reader, "Qwen3_5ForCausalLM", joined=False)
    reader.finish()
    return spec


ARCHITECTURE = with_drafter(family("Qwen3_5ForCausalLM", "qwen3_5_text", from_hf, ignored=qwen3_next.OTHERS))
