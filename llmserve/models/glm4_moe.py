"""GLM-4.5 to 4.7: a mixture with sigmoid routing, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.experts import Mixture, read_groups, read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"partial_rotary_factor": 0.5, "norm_topk_prob": True}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "Glm4MoeForCausalLM", partial=True)
    bias = reader.flag("attention_bias")
    head_norm = HeadNorm.HEADS if reader.flag("use_qk_norm") else HeadNorm.NONE
    mixture = read_glm_mixture(reader, reader.integer("first_k_dense_replace", 1, minimum=0, maximum=spec.num_layers))
    ignored = drafting_layers(reader, spec.num_layers)
    reader.finish()
    return replace(spec, qkv_bias=bias, head_norm=head_norm, mixture=mixture, ignored=ignored)


def drafting_layers(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Patterns of the tensors of layers after the last one, which draft tokens."""
    num_drafting = reader.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_COUNT)
    return tuple(rf"model\.layers\.{num_layers + i}\..*" for i in range(num_drafting))


def read_glm_mixture(reader: ConfigReader, num_dense: int) -> Mixture:
    """Read DeepSeek's keys. `num_dense`: the number of first layers, which have an MLP without experts."""
    size = reader.integer("moe_intermediate_size")
    num_shared = reader.integer("n_shared_experts", 1, minimum=0)
    return read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        dense_layers=range(num_dense),
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        factor=reader.positive("routed_scaling_factor", 1.0),
        groups=read_groups(reader, reader.integer("n_routed_experts", 1), reader.integer("num_experts_per_tok")),
        shared="mlp.shared_experts" if num_shared else "",
        shared_size=num_shared * size,
    )


ARCHITECTURE = family("Glm4MoeForCausalLM", "glm4_moe", from_hf)
