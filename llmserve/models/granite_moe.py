"""Granite-MoE: Granite with a mixture of experts, whose weights sum to 1."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import Mixture, read_mixture
from llmserve.models.family import FamilySpec, family
from llmserve.models.granite import read_granite
from llmserve.models.spec import HfConfig

SHARED, FUSED, DOWN = "shared_mlp", "input_linear", "output_linear"  # modules of the shared expert


def from_hf(config: HfConfig) -> FamilySpec:
    return read_granite_moe(config, "GraniteMoeForCausalLM")


def read_granite_moe(config: HfConfig, architecture: str) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_granite(reader, architecture)
    mixture = read_granite_mixture(reader)
    reader.finish()
    return replace(spec, mixture=mixture)


def read_granite_mixture(reader: ConfigReader) -> Mixture:
    """Read the mixture, with the shared expert if the family has one."""
    shared = reader.integer("shared_intermediate_size", 0, minimum=0)
    return read_mixture(
        reader,
        renormalize=True,
        module="block_sparse_moe",
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
        shared=SHARED if shared else "",
        shared_fused=FUSED,
        shared_down=DOWN,
        shared_size=shared,
    )


ARCHITECTURE = family("GraniteMoeForCausalLM", "granitemoe", from_hf)
