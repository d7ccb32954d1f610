"""DeepSeek-V3, R1 and V3.1: attention over a latent, and the mixture that GLM-4.5 also uses."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.glm4_moe import drafting_layers, read_glm_mixture
from llmserve.models.latent import DEFAULTS, latent_reader, read_latent
from llmserve.models.spec import HfConfig

OWN = {  # transformers' defaults
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = latent_reader(config, DEFAULTS | OWN)
    spec = read_family(reader, "DeepseekV3ForCausalLM")
    latent = read_latent(reader, spec, interleaved=reader.flag("rope_interleave", True))
    for key, value in {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}.items():
        reader.expect(key, value)
    mixture = read_glm_mixture(reader, reader.integer("first_k_dense_replace", 3, minimum=0, maximum=spec.num_layers))
    ignored = drafting_layers(reader, spec.num_layers)
    reader.finish()
    return replace(spec, num_kv_heads=1, head_dim=latent.width, latent=latent, mixture=mixture, ignored=ignored)


ARCHITECTURE = family("DeepseekV3ForCausalLM", "deepseek_v3", from_hf)
