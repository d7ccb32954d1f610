"""Qwen3.5 and 3.6 with experts, text config. The experts of a layer are in one tensor, or in separate tensors."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import qwen3_next
from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, family
from llmserve.models.mtp import with_drafter
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def from_hf(config: HfConfig) -> FamilySpec:
    given = qwen3_next.with_defaults(config)
    reader = ConfigReader(DEFAULTS | {"intermediate_size": 1} | given)  # no layer has a plain MLP
    spec = qwen3_next.read(reader, "Qwen3_5MoeForCausalLM", joined=False)
    stacked = "experts.gate_up_proj", "experts.down_proj"
    mixture = qwen3_next.read_experts(reader, renormalize=True, stacked=stacked, may_be_stacked=True)
    reader.finish()
    return replace(spec, mixture=mixture)


ARCHITECTURE = with_drafter(family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", from_hf, ignored=qwen3_next.OTHERS))
