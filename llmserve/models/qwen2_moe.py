"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2 with a mixture of experts, and a shared expert.

The output of the shared expert is multiplied by the sigmoid of a gate, one number per token.
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_dense_layers, read_mixture
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import read_windows


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "Qwen2MoeForCausalLM")
    windows = read_windows(reader, spec.num_layers)
    mixture = read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        dense_layers=read_dense_layers(reader, spec.num_layers),
        shared_size=reader.integer("shared_expert_intermediate_size"),
        shared="mlp.shared_expert",
        shared_gate="shared_expert_gate",
    )
    qkv_bias = reader.flag("qkv_bias", True)
    reader.finish()
    return replace(spec, windows=windows, qkv_bias=qkv_bias, mixture=mixture)


ARCHITECTURE = family("Qwen2MoeForCausalLM", "qwen2_moe", from_hf)
