"""ERNIE 4.5 with a mixture of experts, selected by softmax and a correction."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import read_mixture
from llmserve.models.family import FamilySpec, family, read_family
from llmserve.models.spec import HfConfig

DEFAULTS = {"rope_theta": 500_000.0, "tie_word_embeddings": True}  # transformers' defaults


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(DEFAULTS | dict(config))
    spec = read_family(reader, "Ernie4_5_MoeForCausalLM")
    bias = reader.flag("use_bias")
    num_shared = reader.integer("moe_num_shared_experts", 2, minimum=0)
    mixture = read_mixture(
        reader,
        expert_size="moe_intermediate_size",
        per_token_key="moe_k",
        renormalize=True,
        dense_layers=_dense_layers(reader, spec.num_layers),
        correction="moe_statics.e_score_correction_bias",
        correction_is_row=True,
        shared="mlp.shared_experts" if num_shared else "",
        shared_size=num_shared * reader.integer("moe_intermediate_size"),
    )
    if bias:
        reader.problems.append("use_bias true is not supported for ERNIE 4.5 with experts")
    reader.finish()
    return replace(spec, interleaved=True, mixture=mixture)


def _dense_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    first = reader.integer("moe_layer_start_index", 1, minimum=0)
    last = reader.integer("moe_layer_end_index", -1, minimum=-1)
    step = reader.integer("moe_layer_interval", 1)
    sparse = range(first, (num_layers if last < 0 else last + 1))
    return tuple(layer for layer in range(num_layers) if layer not in sparse or (layer + 1) % step)


ARCHITECTURE = family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", from_hf, ignored=(r"model\.mtp_.*",))
