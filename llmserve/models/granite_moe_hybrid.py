"""Granite 4 without Mamba: Granite whose MLP is that of every token, with experts beside it or without."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import MAX_COUNT, ConfigReader
from llmserve.models.family import FamilySpec, family
from llmserve.models.granite import read_granite
from llmserve.models.granite_moe import DOWN, FUSED, SHARED, read_granite_mixture
from llmserve.models.spec import HfConfig
from llmserve.models.windows import FULL

ATTENTION = ("attention", FULL)  # as published, and as transformers 5 writes it


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(config)
    spec = read_granite(reader, "GraniteMoeHybridForCausalLM")
    types = reader.get("layer_types", ["mamba"] * spec.num_layers)
    if not isinstance(types, list) or len(types) != spec.num_layers:
        reader.problems.append(f"layer_types must be a list of num_hidden_layers ({spec.num_layers}) names")
    elif other := sorted({str(kind) for kind in types if kind not in ATTENTION}):
        reader.problems.append(f"layers of type {', '.join(other)} are not supported: every layer must be attention")
    reader.expect("position_embedding_type", "rope", "nope")
    turns = reader.get("position_embedding_type") == "rope"
    shared = reader.integer("shared_intermediate_size", 1024)
    has_experts = reader.integer("num_local_experts", 8, minimum=0, maximum=MAX_COUNT) > 0
    mixture = read_granite_mixture(reader) if has_experts else None
    reader.finish()
    return replace(
        spec, intermediate_size=shared, mlp_module=SHARED, fused_mlp=FUSED, mlp_down=DOWN, mixture=mixture,
        unturned=() if turns else range(spec.num_layers),
    )  # fmt: skip


ARCHITECTURE = family("GraniteMoeHybridForCausalLM", "granitemoehybrid", from_hf)
