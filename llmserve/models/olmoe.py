"""OLMoE: Llama with a mixture of experts, one norm over all heads of q, and one over all of k."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_family(reader, "OlmoeForCausalLM")
    reader.expect("attention_bias", False)
    reader.expect("clip_qkv", None)
    mixture = read_mixture(reader)
    reader.finish()
    return replace(spec, head_norm=HeadNorm.WHOLE, mixture=mixture)


ARCHITECTURE = family("OlmoeForCausalLM", "olmoe", from_hf)
