"""Tiny GGUF files of the checkpoints in `tests.checkpoints`, written as llama.cpp's converter writes them.

Names come from the gguf package's own table, numbers from its quantizers; what the converter changes is repeated here
from its source, so that this side knows nothing of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import AROUND_ONE, KINDS, random_tensors
from tests.gguf_hybrids import HYBRIDS, converted_hybrid, hybrid_architecture, hybrid_extras, hybrid_metadata
from tests.tiny_tokenizers import CHAT_TEMPLATE, sentencepiece_model, write_byte_level_tokenizer

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "stablelm": gguf.MODEL_ARCH.STABLELM,
    "nemotron": gguf.MODEL_ARCH.NEMOTRON,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "dots1": gguf.MODEL_ARCH.DOTS1,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "olmo": gguf.MODEL_ARCH.OLMO,
    "jais2": gguf.MODEL_ARCH.JAIS2,
    "phi": gguf.MODEL_ARCH.PHI2,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "afmoe": gguf.MODEL_ARCH.AFMOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
}
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
PERMUTED = (
    "llama",
    "mistral",
    "mixtral",
    "granite",
    "smollm3",
    "arcee",
    "olmo",
    "ministral3",
    "granitemoe",
    "granitemoehybrid",
    "nemotron_h",
)  # whose converter is Llama's
LAYER_NORMS = {  # what config.json calls their epsilon
    "cohere": "layer_norm_eps", "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon", "stablelm": "layer_norm_eps", "nemotron": "norm_eps",
    "jais2": "layer_norm_eps", "olmo": "layer_norm_eps", "phi": "layer_norm_eps",
}  # fmt: skip
RENAMED = {  # by converters, before they look names up
    "e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias",
    "feed_forward.experts.w1": "feed_forward.experts.gate_proj",
    "feed_forward.experts.w2": "feed_forward.experts.down_proj",
    "feed_forward.experts.w3": "feed_forward.experts.up_proj",
}  # fmt: skip
ALL_ATTENTION = ("granite4", "granite4-moe")  # of which the converter makes Granite 3
HYBRID_KINDS = tuple(
    kind for kind, config in KINDS.items() if config["model_type"] in HYBRIDS and kind not in ALL_ATTENTION
)
FLOATS = ("norm.weight", ".bias", "conv.weight", "conv1d.weight", ".A_log", ".D", ".mlp.gate.weight", "proj_a.weight")
GGUF_KINDS = tuple(kind for kind, config in KINDS.items() if config["model_type"] in ARCHITECTURES)


@dataclass(frozen=True)
class Changes:
    """What makes a file another one than the converter's."""

    fused_experts: bool = False  # gate and up of all experts are one tensor
    joined_heads: bool = False  # what makes keys and values of a latent is one tensor, as before April 2025
    renamed: Mapping[str, str] = field(default_factory=dict)
    negated: Sequence[str] = ()
    added: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def make_gguf(
    path: Path,
    kind: str = "llama",
    *,
    seed: int = 0,
    stored: str | Sequence[str] = "F32",
    tokenizer: str = "",
    metadata: Mapping[str, Any] | None = None,
    architecture: gguf.MODEL_ARCH | None = None,
    changes: Changes | None = None,
    split: Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write the checkpoint `kind` (one of GGUF_KINDS or HYBRID_KINDS) into the file `path`, and return it.

    `stored`: ggml's type of the matrices, or several in turn; norms and biases are F32. `tokenizer`: "bpe", "pieces" or
    none. `metadata` is added as it is, whole numbers as uint32; a value None leaves a key out. `architecture`: another
    than that of the kind. `split`: how the writer makes parts of it, which are named after `path`.
    """
    config = KINDS[kind] | config_overrides
    path.parent.mkdir(parents=True, exist_ok=True)
    architecture = architecture or ARCHITECTURES.get(config["model_type"]) or hybrid_architecture(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture], **dict(split or {}))
    entries = model_metadata(config, gguf.MODEL_ARCH_NAMES[architecture]) | tokenizer_metadata(tokenizer, config, path)
    add_metadata(writer, entries | dict(metadata or {}))
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    types = cycle([stored] if isinstance(stored, str) else stored)
    changes = changes or Changes()
    original = hybrid_tensors(config, random_tensors(config, dtype="float32", seed=seed), changes)
    tensors = with_parted_experts(original)
    if not changes.joined_heads:
        tensors = with_parted_heads(config, tensors)
    for name, tensor in with_merged_experts(tensors).items():
        converted = as_converted(name, tensor, config)
        is_matrix = converted.ndim >= 2 and not name.endswith(FLOATS)
        stored_type = gguf.GGMLQuantizationType[next(types) if is_matrix else "F32"]
        if config["model_type"] in HYBRIDS and converted.shape[-1] % gguf.GGML_QUANT_SIZES[stored_type][0]:
            stored_type = gguf.GGMLQuantizationType.F32  # as the converter does
        numbers = quantized(np.ascontiguousarray(converted), stored_type)
        for old, changed in RENAMED.items():
            name = name.replace(old, changed)
        gguf_name = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        numbers = -numbers if gguf_name in changes.negated else numbers
        writer.add_tensor(changes.renamed.get(gguf_name, gguf_name), numbers, raw_dtype=stored_type)
    for name, tensor in (rope_factors(config) | hybrid_extras(config) | dict(changes.added)).items():
        writer.add_tensor(changes.renamed.get(name, name), tensor)
    finish(writer)
    return path


def hybrid_tensors(
    config: dict[str, Any], tensors: Mapping[str, NDArray[Any]], changes: Changes
) -> Mapping[str, NDArray[Any]]:
    if config["model_type"] not in HYBRIDS:
        return tensors
    return converted_hybrid(config, tensors, fused_experts=changes.fused_experts)


def quantized(tensor: NDArray[Any], stored: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Of types to which the package does not quantize: blocks of random codes, about as large as the tensor."""
    if not stored.name.endswith("_K") and not stored.name.startswith("IQ4"):
        numbers: NDArray[Any] = gguf.quants.quantize(tensor, stored)
        return numbers
    length, num_bytes = gguf.GGML_QUANT_SIZES[stored]
    rng = np.random.default_rng(tensor.size)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // length, num_bytes)
    blocks = rng.integers(0, 256, shape, dtype=np.uint8)
    size = np.float32(tensor.std())
    place, factors = {
        "Q2_K": (80, [size / 11, size / 7]),
        "Q3_K": (108, [size / 45]),
        "Q6_K": (208, [size / 1400]),
        "IQ4_NL": (0, [size / 70]),
        "IQ4_XS": (0, [size / 1300]),
    }.get(stored.name, (0, [size / 150, size / 20]))
    drawn = rng.uniform(0.5, 1.0, (*shape[:-1], len(factors))) * factors
    blocks[..., place : place + 2 * len(factors)] = drawn.astype(np.float16).view(np.uint8)
    return blocks.reshape(*tensor.shape[:-1], -1)


def with_parted_experts(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Gate and up as tensors of their own, with outputs as rows."""
    found: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.rpartition(".mlp.experts." if ".mlp.experts." in name else ".block_sparse_moe.")
        if rest == "input_linear.weight":
            for part, rows in zip(("w1", "w3"), np.split(tensor, 2, axis=1), strict=True):
                found[f"{layer}.block_sparse_moe.experts.{part}.weight"] = rows
        elif rest == "output_linear.weight":
            found[f"{layer}.block_sparse_moe.experts.w2.weight"] = tensor
        elif ".feed_forward.experts." in name and name.endswith(("gate_up_proj", "down_proj")):  # of Llama 4
            outputs, stem = tensor.swapaxes(1, 2), name.rpartition(".")[0]
            halves = zip(("gate", "up"), np.split(outputs, 2, axis=1), strict=True)
            parts = dict(halves) if name.endswith("gate_up_proj") else {"down": outputs}
            found |= {f"{stem}.{part}_proj.weight": rows for part, rows in parts.items()}
        elif rest.startswith(("gate_up_proj", "down_proj")) and not rest.endswith("weight"):  # of gpt-oss
            outputs, kind = (tensor, "bias") if rest.endswith("_bias") else (tensor.swapaxes(1, 2), "weight")
            parts = {"gate": outputs[:, ::2], "up": outputs[:, 1::2]} if "gate_up" in rest else {"down": outputs}
            found |= {f"{layer}.mlp.experts.{part}_proj.{kind}": rows for part, rows in parts.items()}
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return found


def with_parted_heads(config: dict[str, Any], tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What makes keys of a latent, transposed, and what makes values, as [heads, ...]."""
    found: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1])
        keys, values = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        found |= {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}
    return found


def with_merged_experts(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Experts' matrices of a layer as one tensor; a gate of one row as a vector."""
    merged: dict[str, list[NDArray[Any]]] = {}
    for name, tensor in tensors.items():
        name = re.sub(r"(\.experts|_layernorm\.norms)\.\d+\.", r"\1.", name).replace(".norms.", ".")
        merged.setdefault(name, []).append(tensor)
    return {
        name: np.stack(found)
        if len(found) > 1 or (".experts." in name and found[0].ndim == 2 and not name.endswith("bias"))
        else found[0].reshape(-1)
        if len(found[0]) == 1
        else found[0]
        for name, found in merged.items()
    }


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, entries: Mapping[str, Any]) -> None:
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)


def model_metadata(config: dict[str, Any], name: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    entries: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": config.get("rope_theta"),
    }
    eps = LAYER_NORMS.get(config["model_type"])
    entries |= (
        {"attention.layer_norm_epsilon": config.get(eps, 1e-5)}
        if eps
        else {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
    )
    entries |= own_metadata(config, head_dim)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if num_experts := next((config[key] for key in counts if key in config), 0):
        used = next(
            config[key] for key in ("moe_topk", "moe_k", "top_k_experts", "num_experts_per_tok") if key in config
        )
        entries |= {"expert_count": num_experts, "expert_used_count": used}
    if config["model_type"] in HYBRIDS:
        entries |= hybrid_metadata(config)
    if config["model_type"] in ("qwen2_moe", "qwen3_moe"):
        entries["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config["model_type"] == "qwen2_moe":
        entries["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        entries |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if config["model_type"] == "olmo3":
        entries["rope.scaling.attn_factor"] = scaling["attention_factor"]
        entries["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if config["model_type"] in PERMUTED:
        entries |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    if "head_dim" in config and config["model_type"] not in LATENT:
        entries |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config["model_type"] in ("mistral", "gemma2", "gemma3_text"):
        entries["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gemma2":
        entries |= {key: config[f"{key}ping"] for key in ("attn_logit_softcap", "final_logit_softcap")}
        entries = {key.replace("softcap", "softcapping"): value for key, value in entries.items()}
    if config["model_type"] == "gemma3_text":
        entries["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    if config["model_type"] in ("granite", "granitemoe"):
        entries |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if config["model_type"] == "glm4":
        entries["rope.dimension_count"] = int(head_dim * config.get("partial_rotary_factor", 0.5))
    if config["model_type"] in ("olmo3", "exaone4", "exaone_moe"):
        entries["attention.sliding_window"] = config["sliding_window"]
        every, count = config.get("sliding_window_pattern", 4), config["num_hidden_layers"]
        entries["attention.sliding_window_pattern"] = [(layer + 1) % every != 0 for layer in range(count)]
    if config["model_type"] in ("phi3", "phimoe"):
        part = config.get("partial_rotary_factor", 1.0)
        original = scaling.get("original_max_position_embeddings") or config.get(
            "original_max_position_embeddings", 4096
        )
        entries |= {
            "rope.scaling.original_context_length": original,
            "rope.dimension_count": int(part * head_dim),
            "attention.sliding_window": config["sliding_window"] or 0,
        }
        if scaling:
            stretch = config["max_position_embeddings"] / original
            entries["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(stretch) / np.log(original)))
    if config["model_type"] == "gemma4_text":
        entries |= {key: value for key, value in hybrid_metadata(config).items() if "length" in key}
    return {f"{name}.{key}": value for key, value in entries.items()}


def own_metadata(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Of families whose converters write other keys than most."""
    kind = config["model_type"]
    if kind == "cohere2":
        window = {"attention.sliding_window": config["sliding_window"]}
        return window | {"logit_scale": config["logit_scale"], "rope.dimension_count": head_dim}
    if kind == "cohere":
        own = {"logit_scale": config["logit_scale"], "rope.dimension_count": head_dim}
        return own | {"rope.scaling.type": "none"}
    if kind == "exaone_moe":
        return {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["num_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": config["routed_scaling_factor"],
        }
    if kind == "jais2":
        return {"rope.dimension_count": head_dim}
    if kind in ("stablelm", "nemotron", "phi"):
        part = config.get("partial_rotary_factor", 0.5 if kind == "nemotron" else 0.25)
        own = {"rope.dimension_count": int(part * head_dim)}
        if kind == "stablelm":
            own["use_parallel_residual"] = config.get("use_parallel_residual", False)
        return own
    if kind == "ministral3":
        rope = config["rope_parameters"]
        return {
            "rope.freq_base": rope["rope_theta"],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if kind in ("glm4_moe", "dots1"):
        own = {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config["norm_topk_prob"],
        }
        if kind == "glm4_moe":
            own |= {"expert_gating_func": 2, "rope.dimension_count": int(head_dim * config["partial_rotary_factor"])}
        return own
    if kind == "afmoe":
        return {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["num_shared_experts"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": config["route_scale"],
            "attention.sliding_window": config["sliding_window"],
        }
    if kind in LATENT:
        rope = config.get("rope_scaling") or {}
        rotary_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
        own = {
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotary_dim,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotary_dim,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotary_dim,
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config.get("norm_topk_prob", True),
            "expert_group_count": config.get("n_group", 1),
            "expert_group_used_count": config.get("topk_group", 1),
            "expert_gating_func": 1 if kind == "deepseek_v2" else 2,
        }
        if config["q_lora_rank"]:
            own["attention.q_lora_rank"] = config["q_lora_rank"]
        if rope:
            own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
            own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
        return own
    if kind == "gpt_oss":
        rope = config["rope_scaling"]
        return {
            "expert_feed_forward_length": config["intermediate_size"],
            "attention.sliding_window": config["sliding_window"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if kind.startswith("lfm2"):
        has_heads = [layer == "full_attention" for layer in config["layer_types"]]
        by_layer = {
            "attention.head_count_kv": [config["num_key_value_heads"] * has for has in has_heads],
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "shortconv.l_cache": config["conv_L_cache"],
            "rope.dimension_count": head_dim,
        }
        if kind == "lfm2":
            inner = int(2 * config["block_ff_dim"] / 3)
            multiple = config["block_multiple_of"]
            return by_layer | {"feed_forward_length": -(-inner // multiple) * multiple}
        return by_layer | {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
        }
    if kind == "llama4_text":
        return {
            "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
            "interleave_moe_layer_step": config["interleave_moe_layer_step"],
            "rope.dimension_count": head_dim,
        }
    if kind == "minimax_m2":
        own = {"expert_feed_forward_length": config["intermediate_size"], "expert_gating_func": 2}
        return own | {"rope.dimension_count": config["rotary_dim"]}
    if kind == "ernie4_5_moe":
        return {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["moe_num_shared_experts"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "interleave_moe_layer_step": config.get("moe_layer_interval", 1),
        }
    if kind.startswith("hunyuan") and config["rope_scaling"]:
        stretch = config["rope_scaling"]["alpha"] ** (head_dim / (head_dim - 2))
        return {"rope.freq_base": float(config["rope_theta"] * stretch)}
    return {}


def as_converted(name: str, tensor: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """What the converter does to a tensor: `permute` of Llama's, 1 + weight of Gemma's norms."""
    if config["model_type"] in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if config["model_type"] in HYBRIDS:
        return tensor
    if name.endswith("conv.conv.weight"):
        return tensor.squeeze(1)
    if config["model_type"].startswith(AROUND_ONE) and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    return tensor


def rope_factors(config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    scaling = config.get("rope_scaling") or {}
    if "long_factor" in scaling:
        return {
            f"rope_factors_{length}.weight": np.array(scaling[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if scaling.get("rope_type") != "llama3":
        return {}
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - keep) / factor + keep)).astype(np.float32)}


def tokenizer_metadata(kind: str, config: dict[str, Any], path: Path) -> dict[str, Any]:
    if kind == "bpe":
        return byte_level_metadata(path.parent / f"{path.stem}-tokenizer", config["vocab_size"])
    if kind == "pieces":
        return pieces_metadata(sentencepiece_model(config["vocab_size"], 3))
    return {}


def byte_level_metadata(folder: Path, vocab_size: int, pre: str = "gpt-2") -> dict[str, Any]:
    """Of the tokenizer that `write_byte_level_tokenizer` writes, which goes to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_byte_level_tokenizer(folder, vocab_size)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {added["content"] for added in content["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def pieces_metadata(model: bytes) -> dict[str, Any]:
    """Of a sentencepiece model, as the converter takes it apart."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.vocab_size())
    kinds = ((2, pieces.is_unknown), (3, pieces.is_control), (5, pieces.is_unused), (6, pieces.is_byte))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(pieces.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for kind, is_kind in kinds if is_kind(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
    }
