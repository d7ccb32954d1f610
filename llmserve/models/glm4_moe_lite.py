"""GLM-4.7-Flash: DeepSeek-V3's attention and GLM-4.5's mixture."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.experts import read_dense_types
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.glm4_moe import drafting_layers, read_glm_mixture
from llmserve.models.latent import latent_reader, read_latent
from llmserve.models.spec import HfConfig

DEFAULTS = {  # transformers' defaults
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = latent_reader(config, DEFAULTS)
    spec = read_family(reader, "Glm4MoeLiteForCausalLM")
    latent = read_latent(reader, spec, interleaved=reader.flag("rope_interleave", True))
    dense = read_dense_types(reader, spec.num_layers, 1)
    if reader.get("mlp_layer_types") is None:
        reader.expect("first_k_dense_replace", 1)  # transformers does not read it
    mixture = replace(read_glm_mixture(reader, 0), dense_layers=dense)
    ignored = drafting_layers(reader, spec.num_layers)
    reader.finish()
    return replace(spec, num_kv_heads=1, head_dim=latent.width, latent=latent, mixture=mixture, ignored=ignored)


ARCHITECTURE = family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", from_hf)
