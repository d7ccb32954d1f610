"""LFM2: short convolutions in most layers, attention with norms of heads in the others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from llmserve.models import family
from llmserve.models.config import MAX_COUNT, MAX_SIZE, ConfigReader
from llmserve.models.delta_net import stateful_layers
from llmserve.models.family import FamilySpec, HeadNorm, Norms, read_family
from llmserve.models.short_convolution import ShortConvolution
from llmserve.models.spec import Architecture, HfConfig
from llmserve.models.windows import FULL

DEFAULTS = {  # transformers' defaults
    "norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "rope_theta": 1_000_000.0, "max_position_embeddings": 128_000,
}  # fmt: skip
NORMS = Norms("operator_norm", "", "ffn_norm", "")
CONVOLUTION = "conv"
NAMES = {  # Llama's module names in `weights.py` to this family's
    "model.norm": "model.embedding_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
}


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader(with_defaults(config))
    spec = read(reader, "Lfm2ForCausalLM")
    inner = spec.intermediate_size
    if reader.flag("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if config.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = reader.integer("block_multiple_of")
            wider = min(reader.positive("block_ffn_dim_multiplier") * inner, 2.0 * MAX_SIZE)
            inner = -(-int(wider) // multiple) * multiple
    if not 0 < inner <= MAX_SIZE:
        reader.problems.append(f"intermediate_size must be an integer from 1 to {MAX_SIZE}, adjusted it is {inner}")
    reader.finish()
    return replace(spec, intermediate_size=inner)


def with_defaults(config: HfConfig) -> dict[str, Any]:
    """Add defaults, and read older names of keys."""
    given = {key: value for key, value in config.items() if value is not None}
    given["tie_word_embeddings"] = given.get("tie_embedding", given.get("tie_word_embeddings", True))
    if "block_ff_dim" in given:
        given["intermediate_size"] = given["block_ff_dim"]
    return DEFAULTS | given


def read(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that LFM2 with experts shares."""
    spec = read_family(reader, architecture, eps_key="norm_eps")
    taps = reader.integer("conv_L_cache", minimum=2, maximum=MAX_COUNT)
    types = _layer_types(reader, spec.num_layers)
    layers = stateful_layers(reader, types, spec.num_layers, stateful=CONVOLUTION)
    return replace(
        spec, norms=NORMS, head_norm=HeadNorm.HEADS, head_norm_modules=("q_layernorm", "k_layernorm"),
        mlp_module="feed_forward", mlp_down="w2", stateful_layers=layers,
        mixer=ShortConvolution(taps, reader.flag("conv_bias")),
    )  # fmt: skip


def _layer_types(reader: ConfigReader, num_layers: int) -> object:
    """Types from `layer_types`, else from `full_attn_idxs`, the indices of the layers with attention."""
    listed = reader.get("full_attn_idxs", list(range(num_layers)))
    if not isinstance(listed, list):
        reader.problems.append(f"full_attn_idxs must be a list of layers, got {listed!r}")
        listed = list(range(num_layers))
    return reader.get("layer_types", [FULL if layer in listed else CONVOLUTION for layer in range(num_layers)])


def architecture(name: str, model_type: str, from_hf: Any) -> Architecture[FamilySpec]:
    return replace(family.family(name, model_type, from_hf), params=partial(family.renamed_params, names=NAMES))


ARCHITECTURE = architecture("Lfm2ForCausalLM", "lfm2", from_hf)
