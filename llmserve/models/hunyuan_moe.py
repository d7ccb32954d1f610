"""Hunyuan-MoE: Hunyuan with a mixture of experts, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, family
from llmserve.models.hunyuan import read_hunyuan, with_own_rope
from llmserve.models.spec import HfConfig


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(_one_for_all_layers(config))
    spec = read_hunyuan(reader, "HunYuanMoEV1ForCausalLM")
    mixture = read_mixture(
        reader,
        per_token_key="moe_topk",
        renormalize=True,
        router="gate.wg",
        shared="mlp.shared_mlp",
        shared_size=spec.intermediate_size,
    )
    reader.finish()
    return replace(spec, mixture=mixture)


def _one_for_all_layers(config: HfConfig) -> HfConfig:
    """Replace lists of equal numbers, one per layer, as in the published config, by that number."""
    lists = {key: config.get(key) for key in ("num_experts", "moe_topk")}
    same = {key: values[0] for key, values in lists.items() if isinstance(values, list) and len(set(values)) == 1}
    return dict(with_own_rope(config)) | same


ARCHITECTURE = family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", from_hf)
