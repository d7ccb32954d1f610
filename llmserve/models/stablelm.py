"""StableLM: Llama with layer norms and partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, Norms, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}  # transformers' defaults
HEAD_NORMS = ("q_layernorm.norms", "k_layernorm.norms")


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "StableLmForCausalLM", partial=True, eps_key="layer_norm_eps")
    bias = reader.flag("use_qkv_bias")
    head_norm = HeadNorm.OWN if reader.flag("qk_layernorm") else HeadNorm.NONE
    is_parallel = reader.flag("use_parallel_residual")
    reader.finish()
    return replace(
        spec, layer_norm=True, norm_bias=True, qkv_bias=bias, head_norm=head_norm, head_norm_modules=HEAD_NORMS,
        is_parallel=is_parallel, norms=Norms(mlp="") if is_parallel else Norms(),
    )  # fmt: skip


ARCHITECTURE = family("StableLmForCausalLM", "stablelm", from_hf)
