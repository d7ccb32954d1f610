"""Granite-MoE with the windows of `granite_swa.py`."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family
from llmserve.models.granite_moe import read_granite_mixture
from llmserve.models.granite_swa import read_granite_swa
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_granite_swa(reader, "GraniteMoeSWAForCausalLM")
    mixture = replace(
        read_granite_mixture(reader), router="router", stacked=("experts.gate_up_proj", "experts.down_proj")
    )
    reader.finish()
    return replace(spec, mixture=mixture)


ARCHITECTURE = family("GraniteMoeSWAForCausalLM", "granitemoe_swa", from_hf)
