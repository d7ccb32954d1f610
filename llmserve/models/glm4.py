"""GLM-4-0414: GLM-4 with additional norms after the blocks."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, Norms, family
from llmserve.models.glm import DEFAULTS, read_glm
from llmserve.models.spec import HfConfig

NORMS = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_glm(reader, "Glm4ForCausalLM")
    reader.finish()
    return replace(spec, norms=NORMS)


ARCHITECTURE = family("Glm4ForCausalLM", "glm4", from_hf)
