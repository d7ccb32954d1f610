"""Llama 4's language model: attention within chunks of positions, except in layers without a rotary embedding.

Each token uses a shared expert and one of many others, whose input is multiplied by its score.
"""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.experts import Mixture, read_mixture
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.smollm3 import read_unturned
from llmserve.models.spec import HfConfig, PositionScale
from llmserve.models.windows import FULL

DEFAULTS = {  # transformers' defaults
    "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "num_local_experts": 16,
    "num_experts_per_tok": 1, "intermediate_size_mlp": 16384, "max_position_embeddings": 131072,
}  # fmt: skip
DEFAULT_CHUNK = 8192
CHUNKED = "chunked_attention"


def from_hf(config: HfConfig) -> FamilySpec:
    given = {key: value for key, value in config.items() if value is not None}
    if given.get("no_rope_layers") == []:  # means the default
        del given["no_rope_layers"]
    reader = ConfigReader(DEFAULTS | given)
    spec = read_family(reader, "Llama4ForCausalLM")
    unturned = read_unturned(reader, spec.num_layers)
    windows = _read_chunks(reader, config, spec.num_layers, unturned)
    bias = reader.flag("attention_bias")
    head_norm = HeadNorm.LENGTH if reader.flag("use_qk_norm", True) else HeadNorm.NONE
    grown = None
    reader.expect("attn_temperature_tuning", True, False, 4)  # 4 in the first published configs
    if reader.get("attn_temperature_tuning", True):
        interval = reader.integer("floor_scale", DEFAULT_CHUNK)
        grown = PositionScale(reader.positive("attn_scale", 0.1), interval, shift=1, layers=unturned)
    mixture = _read_experts(reader, spec.num_layers)
    inner = reader.integer("intermediate_size_mlp")
    reader.finish()
    return replace(
        spec, intermediate_size=inner, windows=windows, chunked=True, unturned=unturned, interleaved=True,
        head_norm=head_norm, position_scale=grown, qkv_bias=bias, output_bias=bias, mlp_module="feed_forward",
        mixture=mixture,
    )  # fmt: skip


def _read_chunks(reader: ConfigReader, config: HfConfig, num_layers: int, unturned: tuple[int, ...]) -> tuple[int, ...]:
    """The chunk length of each layer; 0: full attention."""
    types = reader.get("layer_types", [FULL if layer in unturned else CHUNKED for layer in range(num_layers)])
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {FULL, CHUNKED}:
        reader.problems.append(f"layer_types must be a list of num_hidden_layers ({num_layers}) {FULL} or {CHUNKED}")
        types = []
    if CHUNKED not in types:
        return ()
    given = "attention_chunk_size" in config
    chunk = reader.integer("attention_chunk_size", None if given else DEFAULT_CHUNK)
    return tuple(chunk if kind == CHUNKED else 0 for kind in types)


def _read_experts(reader: ConfigReader, num_layers: int) -> Mixture | None:
    step = reader.integer("interleave_moe_layer_step", 1)
    listed = reader.get("moe_layers", list(range(step - 1, num_layers, step)))
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        reader.problems.append(f"moe_layers must be a list of integers, got {listed!r}")
        listed = []
    mixture = read_mixture(
        reader, renormalize=False, module="feed_forward", router="router", sigmoid=True, is_transposed=True,
        stacked=("experts.gate_up_proj", "experts.down_proj"), scales_inputs=True, shared="feed_forward.shared_expert",
        shared_size=reader.integer("intermediate_size"),
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in listed),
    )  # fmt: skip
    return mixture if len(mixture.dense_layers) < num_layers else None


ARCHITECTURE = family("Llama4ForCausalLM", "llama4_text", from_hf)
