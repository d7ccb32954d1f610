"""VaultGemma: Gemma 2 without norms after the blocks."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.family import FamilySpec, Norms, family
from llmserve.models.gemma2 import from_hf as read_gemma2
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    norms = Norms("input_layernorm", "", "pre_feedforward_layernorm", "")
    return replace(read_gemma2(config), architecture="VaultGemmaForCausalLM", norms=norms)


ARCHITECTURE = family("VaultGemmaForCausalLM", "vaultgemma", from_hf)
