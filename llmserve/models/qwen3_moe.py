"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all or some layers."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import qwen3
from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_dense_layers, read_mixture
from llmserve.models.family import FamilySpec, family
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = qwen3.read(reader, "Qwen3MoeForCausalLM")
    reader.expect("use_sliding_window", False)
    dense = read_dense_layers(reader, spec.num_layers)
    mixture = read_mixture(reader, expert_size="moe_intermediate_size", dense_layers=dense)
    reader.finish()
    return replace(spec, mixture=mixture)


ARCHITECTURE = family("Qwen3MoeForCausalLM", "qwen3_moe", from_hf)
