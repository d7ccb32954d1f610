"""EXAONE-MoE (K-EXAONE): EXAONE 4's attention with norms before the blocks, and DeepSeek's mixture."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.exaone4 import read_exaone
from llmserve.models.experts import read_dense_types, read_groups, read_mixture
from llmserve.models.family import FamilySpec, family
from llmserve.models.spec import HfConfig

DEFAULTS = {"norm_topk_prob": True, "num_shared_experts": 1, "routed_scaling_factor": 2.5}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_exaone(reader, "ExaoneMoeForCausalLM")
    num_dense = reader.integer("first_k_dense_replace", 1, minimum=0, maximum=MAX_COUNT)
    mixture = read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        dense_layers=read_dense_types(reader, spec.num_layers, num_dense),
        sigmoid=True,
        correction="e_score_correction_bias",
        factor=reader.positive("routed_scaling_factor"),
        groups=read_groups(reader, reader.integer("num_experts"), reader.integer("num_experts_per_tok")),
        shared="mlp.shared_experts",
        shared_size=reader.integer("num_shared_experts") * reader.integer("moe_intermediate_size"),
    )
    reader.finish()
    return replace(spec, mixture=mixture)


NAMES = ("ExaoneMoEForCausalLM",)  # in its first configs
ARCHITECTURE = family("ExaoneMoeForCausalLM", "exaone_moe", from_hf, other_names=NAMES, ignored=(r"mtp\..*",))
