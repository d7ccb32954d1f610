"""AFMoE (Arcee Trinity): experts, gated attention, norms around each block, rotary embedding only with a window."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, Norms, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import types_by_pattern, windows_by_type

DEFAULTS = {"head_dim": 128, "num_dense_layers": 1, "num_shared_experts": 2, "sliding_window": 1024}  # transformers'
# keys of published configs, and the only supported value
KNOWN = {"num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True, "score_func": "sigmoid"}
NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "AfmoeForCausalLM")
    usual = types_by_pattern(spec.num_layers, reader.integer("global_attn_every_n_layers", 4))
    window = reader.integer("sliding_window")
    windows = windows_by_type(reader, reader.get("layer_types", usual), spec.num_layers, window)
    for key, value in ({"attention_bias": False} | KNOWN).items():
        reader.expect(key, value)
    is_scaled = reader.flag("mup_enabled")
    mixture = read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        renormalize=True,
        dense_layers=range(reader.integer("num_dense_layers", minimum=0, maximum=MAX_COUNT)),
        router="router.gate",
        sigmoid=True,
        correction="expert_bias",
        factor=reader.positive("route_scale", 1.0),
        shared="mlp.shared_experts",
        shared_size=reader.integer("num_shared_experts") * reader.integer("moe_intermediate_size"),
    )
    reader.finish()
    return replace(
        spec, windows=windows, unturned=[i for i in range(spec.num_layers) if not (windows and windows[i])],
        norms=NORMS, head_norm=HeadNorm.HEADS, gated_heads=True, gate_module="gate_proj",
        embed_scale=spec.hidden_size**0.5 if is_scaled else 1.0, mixture=mixture,
    )  # fmt: skip


ARCHITECTURE = family("AfmoeForCausalLM", "afmoe", from_hf)
