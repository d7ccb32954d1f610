"""DeepSeek-V2, also Lite and Coder: attention over a latent, and a mixture with softmax weights."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.experts import read_groups, read_mixture
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.latent import DEFAULTS, latent_reader, read_latent
from llmserve.models.spec import HfConfig

GREEDY, BY_GROUPS = "greedy", "group_limited_greedy"


def from_hf(config: HfConfig) -> FamilySpec:
    reader = latent_reader(config, DEFAULTS)
    spec = read_family(reader, "DeepseekV2ForCausalLM")
    latent = read_latent(reader, spec, interleaved=True)
    reader.expect("topk_method", GREEDY, BY_GROUPS)
    for key, value in {"norm_topk_prob": False, "moe_layer_freq": 1, "mlp_bias": False}.items():
        reader.expect(key, value)
    counts = reader.integer("n_routed_experts", 64), reader.integer("num_experts_per_tok")
    num_dense = reader.integer("first_k_dense_replace", 0, minimum=0, maximum=spec.num_layers)
    num_shared = reader.integer("n_shared_experts", 2, minimum=0)
    groups = read_groups(reader, *counts) if reader.get("topk_method") == BY_GROUPS else (0, 0)
    mixture = read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        renormalize=False,
        dense_layers=range(num_dense),
        factor=reader.positive("routed_scaling_factor", 1.0),
        groups=groups,
        by_best=groups != (0, 0),
        shared="mlp.shared_experts" if num_shared else "",
        shared_size=num_shared * reader.integer("moe_intermediate_size"),
    )
    reader.finish()
    return replace(spec, num_kv_heads=1, head_dim=latent.width, latent=latent, mixture=mixture)


ARCHITECTURE = family("DeepseekV2ForCausalLM", "deepseek_v2", from_hf)
