"""Granite 4: Granite with a shared MLP, with or without experts, and with Mamba in most layers or in none."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.delta_net import LINEAR, stateful_layers
from llmserve.models.family import FamilySpec, family
from llmserve.models.granite import read_granite
from llmserve.models.granite_moe import DOWN, FUSED, SHARED, read_granite_mixture
from llmserve.models.mamba import DEFAULTS, read_mamba
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL

NAMES = {"attention": FULL, "mamba": LINEAR}  # published layer types to those of transformers 5


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | {key: value for key, value in config.items() if value is not None})
    spec = read_granite(reader, "GraniteMoeHybridForCausalLM")
    types = reader.get("layer_types", [LINEAR] * spec.num_layers)
    if isinstance(types, list):
        types = [NAMES.get(str(kind), kind) for kind in types]
    layers = stateful_layers(reader, types, spec.num_layers)
    inner = reader.integer("mamba_expand") * spec.hidden_size
    mamba = read_mamba(reader, reader.positive("rms_norm_eps"), inner=inner) if layers else None
    reader.expect("position_embedding_type", "rope", "nope")
    turns = reader.get("position_embedding_type") == "rope"
    shared = reader.integer("shared_intermediate_size", 1024)
    has_experts = reader.integer("num_local_experts", 8, minimum=0, maximum=MAX_COUNT) > 0
    mixture = read_granite_mixture(reader) if has_experts else None
    reader.finish()
    return replace(
        spec, intermediate_size=shared, mlp_module=SHARED, fused_mlp=FUSED, mlp_down=DOWN, mixture=mixture,
        stateful_layers=layers, mixer=mamba, unturned=() if turns else range(spec.num_layers),
    )  # fmt: skip


ARCHITECTURE = family("GraniteMoeHybridForCausalLM", "granitemoehybrid", from_hf)
