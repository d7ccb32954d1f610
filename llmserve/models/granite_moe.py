"""Granite-MoE: Granite with a mixture of experts, whose weights have a sum of one."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, family
from llmserve.models.granite import read_granite
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_granite(reader, "GraniteMoeForCausalLM")
    mixture = read_mixture(
        reader,
        renormalize=True,
        module="block_sparse_moe",
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
    )
    reader.finish()
    return replace(spec, mixture=mixture)


ARCHITECTURE = family("GraniteMoeForCausalLM", "granitemoe", from_hf)
