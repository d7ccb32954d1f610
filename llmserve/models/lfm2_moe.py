"""LFM2 with experts: sigmoid routing, after a few layers without experts."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models import lfm2
from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults
    "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
}  # fmt: skip


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | lfm2.with_defaults(config))
    spec = lfm2.read(reader, "Lfm2MoeForCausalLM")
    num_dense = reader.integer("num_dense_layers", minimum=0, maximum=MAX_COUNT)
    mixture = read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        module="feed_forward",
        names=("w1", "w3", "w2"),
        sigmoid=True,
        correction="expert_bias" if reader.flag("use_expert_bias") else "",
        factor=reader.positive("routed_scaling_factor"),
        dense_layers=range(min(num_dense, spec.num_layers)),
    )
    reader.finish()
    return replace(spec, mixture=mixture)


ARCHITECTURE = lfm2.architecture("Lfm2MoeForCausalLM", "lfm2_moe", from_hf)
