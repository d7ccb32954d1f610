"""OLMo 2: norms after attention and MLP instead of before, one over all heads of q and one over all of k."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, Norms, family, read_family
from llmserve.models.spec import HfConfig

NORMS = Norms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "Olmo2ForCausalLM")
    bias = reader.flag("attention_bias")
    reader.finish()
    return replace(spec, norms=NORMS, head_norm=HeadNorm.WHOLE, qkv_bias=bias, output_bias=bias)


ARCHITECTURE = family("Olmo2ForCausalLM", "olmo2", from_hf)
