"""HyperCLOVA X: Granite with additional norms after the blocks, and with logits multiplied by their scaling."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, Norms, family
from llmserve.models.granite import read_granite
from llmserve.models.spec import HfConfig

NORMS = Norms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_granite(reader, "HyperCLOVAXForCausalLM")
    scale = reader.positive("attention_multiplier", spec.head_dim**-0.5)
    logit_scale = reader.positive("logits_scaling", 1.0)
    mlp_bias = reader.flag("mlp_bias")
    has_norms = reader.flag("use_post_norm", True)
    if has_norms:  # with a multiplier, they would need another epsilon than the other norms
        reader.expect("residual_multiplier", 1.0)
    reader.finish()
    return replace(
        spec, attention_scale=scale, logit_scale=logit_scale, mlp_bias=mlp_bias, norms=NORMS if has_norms else Norms()
    )


ARCHITECTURE = family("HyperCLOVAXForCausalLM", "hyperclovax", from_hf)
