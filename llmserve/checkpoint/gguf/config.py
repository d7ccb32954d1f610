"""Makes the config.json of transformers' equivalent network from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from llmserve.checkpoint.gguf import encoders, families, hybrids, mixtures
from llmserve.checkpoint.gguf.described import Config, Described
from llmserve.checkpoint.gguf.families import DEFAULT_THETA, KV_HEADS, MLP_SIZE
from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.errors import Unsupported, raise_problems

RMS_EPSILON = "{}.attention.layer_norm_rms_epsilon"
OWN = {**families.OWN, **mixtures.OWN, **hybrids.OWN, **encoders.OWN}
# Metadata that changes a network, and the value that does not.
NEUTRAL: Mapping[str, object] = {
    "{}.expert_count": 0,  # for architectures without one
    "{}.expert_gating_func": 1,  # softmax
    "{}.expert_group_count": 1,
    "{}.expert_weights_scale": 1.0,
    "{}.attention.causal": True,
    "{}.attention.clamp_kqv": 0.0,
    "{}.attention.max_alibi_bias": 0.0,
    "{}.attention.scale": 0.0,
    "{}.embedding_scale": 1.0,
    "{}.logit_scale": 1.0,
    "{}.residual_scale": 1.0,
    "{}.rope.scaling.yarn_ext_factor": 1.0,
    "{}.rope.scaling.yarn_log_multiplier": 0.0,
    "{}.use_parallel_residual": False,
}


def config_of(file: Described) -> Config:
    """Problems with single values go to the reader; raises Unsupported for an unknown network."""
    reader, shapes = file.reader, file.shapes
    _refuse_other_networks(reader, file.architecture.own_keys)
    hidden_size, num_heads = reader.integer("{}.embedding_length"), reader.integer("{}.attention.head_count")
    head_dim = reader.integer("{}.attention.key_length", max(1, hidden_size // num_heads))
    if reader.integer("{}.attention.value_length", head_dim) != head_dim and not file.architecture.latent:
        reader.problems.append("keys and values of different lengths (attention.value_length) are not supported")
    config: Config = {
        "architectures": [file.architecture.hf_name],
        "model_type": file.architecture.model_type,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": hidden_size,
        "intermediate_size": _mlp_size(file),
        "num_hidden_layers": reader.integer("{}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if file.architecture.by_layer else reader.integer(KV_HEADS, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": reader.integer("{}.context_length"),
        file.architecture.layer_norm or "rms_norm_eps": _epsilon(file),
        "rope_theta": reader.positive("{}.rope.freq_base", DEFAULT_THETA),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if (scaling := _rope_scaling(reader)) is not None:
        config["rope_scaling"] = scaling
    return config | OWN[file.architecture.name](file, config) | encoders.scored(file)


def _epsilon(file: Described) -> float:
    """Converters of Nemotron-H write the epsilon of RMS norms under the key for norms that subtract the mean."""
    of_others = "{}.attention.layer_norm_epsilon"
    if file.architecture.layer_norm or (not file.reader.has(RMS_EPSILON) and file.reader.has(of_others)):
        return file.reader.positive(of_others)
    return file.reader.positive(RMS_EPSILON)


def _mlp_size(file: Described) -> int:
    """The file may omit it if every layer has experts."""
    if file.architecture.by_layer and isinstance(file.reader.metadata.get(file.reader.key(MLP_SIZE)), np.ndarray):
        return 1
    inner = file.reader.metadata.get(file.reader.key("{}.expert_feed_forward_length"))
    return file.reader.integer(MLP_SIZE, inner if isinstance(inner, int) and inner else None)


def _refuse_other_networks(reader: MetadataReader, own_keys: Collection[str]) -> None:
    changed = [
        f"{reader.key(key)} {value!r} is not supported: it changes the network"
        for key, neutral in NEUTRAL.items()
        if key not in own_keys
        if isinstance(value := reader.metadata.get(reader.key(key), neutral), np.ndarray) or value != neutral
    ]
    raise_problems(Unsupported, f"architecture {reader.architecture!r}", changed)


def _rope_scaling(reader: MetadataReader) -> Config | None:
    """By type and factor; the architecture handles scaling by separate factors.

    `yarn_attn_factor` is ignored: converters write vLLM's attn_factor or transformers' attention_factor there, and
    llama.cpp reads neither.
    """
    kind = reader.text("{}.rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        if not reader.has("{}.rope.scale_linear"):
            return None
        linear = reader.positive("{}.rope.scale_linear")  # files from 2023
        return None if linear == 1.0 else {"rope_type": "linear", "factor": linear}
    if kind not in ("linear", "yarn"):
        reader.problems.append(f"{reader.key('{}.rope.scaling.type')} {kind!r} is not supported")
        return None
    scaling: Config = {"rope_type": kind, "factor": reader.positive("{}.rope.scaling.factor")}
    if kind == "yarn":
        optional = {
            "attention_factor": "{}.rope.scaling.attn_factor",
            "beta_fast": "{}.rope.scaling.yarn_beta_fast",
            "beta_slow": "{}.rope.scaling.yarn_beta_slow",
        }
        scaling |= {name: reader.positive(key) for name, key in optional.items() if reader.has(key)}
        if reader.has("{}.rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = reader.integer("{}.rope.scaling.original_context_length")
    return scaling
