"""Small networks with states, and others of unusual layers, of the architectures themselves, with random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.models.registry import architecture_for
from llmserve.models.spec import HfConfig, Param
from tests.checkpoints import KINDS
from tests.engine.cpu.networks import Network

SMALL: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 40, "vocab_size": 83, "num_hidden_layers": 2}
CONFIGS: Mapping[str, HfConfig] = {
    # the convolution has a bias
    "lfm2": KINDS["lfm2"]
    | SMALL
    | {"block_ff_dim": 40, "layer_types": ["conv", "full_attention"], "num_attention_heads": 4, "conv_bias": True},
    # two key heads that serve two heads each, whose matrices take more than one program in WIDE_TILES
    "qwen3.5": KINDS["qwen3.5"]
    | SMALL
    | {
        "num_attention_heads": 4,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 72,
        "linear_num_value_heads": 4,
        "full_attention_interval": 2,
    },
    # two groups of two heads
    "granite4-h": KINDS["granite4-h"]
    | SMALL
    | {
        "num_attention_heads": 4,
        "shared_intermediate_size": 40,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 24,
        "mamba_n_groups": 2,
        "mamba_d_state": 20,
    },
    # a scan beside attention; norms of groups behind the gate, and before it
    "falcon-h1": KINDS["falcon-h1"]
    | SMALL
    | {"num_hidden_layers": 1, "num_attention_heads": 4, "mamba_d_ssm": 90, "mamba_norm_before_gate": True},
    "bamba": KINDS["bamba"] | SMALL | {"num_attention_heads": 3, "mamba_n_heads": 6},
    # MLPs of squares
    "nemotron-h": KINDS["nemotron-h"] | SMALL | {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3},
}
UNUSUAL: Mapping[str, HfConfig] = {
    # layers read sums themselves, and norm what they make
    "olmo2": KINDS["olmo2"] | SMALL | {"num_hidden_layers": 1},
    # heads of two sizes and two groups, keys that are values, a layer that reads another's cache, inputs of layers
    "gemma4": KINDS["gemma4"]
    | SMALL
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "sliding_window": 5,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 83,
    },
    # norms with a mean, of heads too; queries that grow every four tokens
    "stablelm": KINDS["stablelm"] | SMALL | {"num_hidden_layers": 1, "num_attention_heads": 4},
    "ministral3": KINDS["ministral3"]
    | SMALL
    | {
        "num_hidden_layers": 1,
        "rope_parameters": KINDS["ministral3"]["rope_parameters"] | {"original_max_position_embeddings": 4},
    },
    # norms behind the rotary embedding
    "hunyuan": KINDS["hunyuan"] | SMALL | {"num_hidden_layers": 1, "num_attention_heads": 4},
    # several streams, gates that few pass, inputs of layers for some tokens only
    "gemma3n": KINDS["gemma3n"]
    | SMALL
    | {
        "intermediate_size": [40, 36],
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.8, 0.0],
        "vocab_size_per_layer_input": 50,
    },
}


def hybrid(name: str) -> Network:
    config = {**CONFIGS, **UNUSUAL}[name]
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    rng = np.random.default_rng(5)
    params = architecture.params(spec)
    arrays = {param.name: _numbers(param, rng) for param in params}
    kept = frozenset(param.name for param in params if not param.quantizable)
    return Network(architecture.program(spec), arrays, kept)


def _numbers(param: Param, rng: np.random.Generator) -> NDArray[np.float32]:
    """Norms and scales around one, convolutions and biases small, matrices of a size that leaves rows as
    large as they are."""
    spread = 0.3 if len(param.shape) == 1 else 1.0 / np.sqrt(param.shape[-1])
    near = 1.0 if "norm" in param.name or "scale" in param.name else 0.0
    return (near + spread * rng.standard_normal(param.shape)).astype(np.float32)
