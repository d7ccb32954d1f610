"""The metadata of a GGUF file as the config.json that transformers would have for the same network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from llmserve.checkpoint.gguf.architectures import MIXTRAL, ROPE_FREQS, ROPE_LONG, ROPE_SHORT, GgufArchitecture
from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.stored_tensor import Tensor
from llmserve.errors import Unsupported, raise_problems

Config: TypeAlias = dict[str, Any]

DEFAULT_THETA = 10_000.0
GEMMA_SCALE_BY_WIDTH = {
    "gemma2": 46,
    "gemma3": 62,
}  # layers of the 27B models, whose attention is scaled by another rule
GEMMA3_PATTERN = 6
BIASED = {"attention_bias": "attn_q", "mlp_bias": "ffn_down"}
# What makes another network of one that we know, and the value that does not.
NEUTRAL: Mapping[str, object] = {
    "{}.expert_count": 0,  # of the architectures that have none
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


@dataclass(frozen=True, slots=True)
class Described:
    """What a config is made from."""

    reader: MetadataReader
    architecture: GgufArchitecture
    shapes: Mapping[str, tuple[int, ...]]  # of the tensors, by GGUF's names
    factors: Mapping[str, Tensor]  # the architecture's `factors`, as far as the file has them


def config_of(file: Described) -> Config:
    """Problems of single values go to the reader; Unsupported for a network that is none of ours."""
    reader, shapes = file.reader, file.shapes
    _refuse_other_networks(reader, file.architecture.own_keys)
    hidden_size, num_heads = reader.integer("{}.embedding_length"), reader.integer("{}.attention.head_count")
    head_dim = reader.integer("{}.attention.key_length", max(1, hidden_size // num_heads))
    if reader.integer("{}.attention.value_length", head_dim) != head_dim:
        reader.problems.append("keys and values of different lengths (attention.value_length) are not supported")
    config: Config = {
        "architectures": [file.architecture.hf_name],
        "model_type": file.architecture.model_type,
        "vocab_size": shapes.get("token_embd.weight", (0,))[0],
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("{}.feed_forward_length"),
        "num_hidden_layers": reader.integer("{}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.integer("{}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": reader.integer("{}.context_length"),
        file.architecture.layer_norm or "rms_norm_eps": reader.positive(
            f"{{}}.attention.layer_norm_{'' if file.architecture.layer_norm else 'rms_'}epsilon"
        ),
        "rope_theta": reader.positive("{}.rope.freq_base", DEFAULT_THETA),
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    if (scaling := _rope_scaling(reader)) is not None:
        config["rope_scaling"] = scaling
    return config | OWN[file.architecture.name](file, config)


def _refuse_other_networks(reader: MetadataReader, own_keys: Collection[str]) -> None:
    changed = [
        f"{reader.key(key)} {value!r} makes it a network that is not supported"
        for key, neutral in NEUTRAL.items()
        if key not in own_keys
        if isinstance(value := reader.metadata.get(reader.key(key), neutral), np.ndarray) or value != neutral
    ]
    raise_problems(Unsupported, f"architecture {reader.architecture!r}", changed)


def _rope_scaling(reader: MetadataReader) -> Config | None:
    """By type and factor; scaling by factors of their own is the architecture's."""
    kind = reader.text("{}.rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        if not reader.has("{}.rope.scale_linear"):
            return None
        linear = reader.positive("{}.rope.scale_linear")  # files of 2023
        return None if linear == 1.0 else {"rope_type": "linear", "factor": linear}
    if kind not in ("linear", "yarn"):
        reader.problems.append(f"{reader.key('{}.rope.scaling.type')} {kind!r} is not supported")
        return None
    scaling: Config = {"rope_type": kind, "factor": reader.positive("{}.rope.scaling.factor")}
    if kind == "yarn":
        optional = {
            "attention_factor": f"{{}}.rope.scaling.{_attn_factor_key(reader)}",
            "beta_fast": "{}.rope.scaling.yarn_beta_fast",
            "beta_slow": "{}.rope.scaling.yarn_beta_slow",
        }
        scaling |= {name: reader.positive(key) for name, key in optional.items() if reader.has(key)}
        if reader.has("{}.rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = reader.integer("{}.rope.scaling.original_context_length")
    return scaling


def _attn_factor_key(reader: MetadataReader) -> str:
    return next((key for key in ("yarn_attn_factor", "attn_factor") if reader.has(f"{{}}.rope.scaling.{key}")), "")


def _require_whole_heads(reader: MetadataReader, config: Config) -> None:
    """Every element of a head is turned."""
    if reader.integer("{}.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        reader.problems.append(
            f"{reader.key('{}.rope.dimension_count')} must be the head size ({config['head_dim']}): heads that are "
            "turned in part are not supported"
        )


def _frequency_factors(file: Described, config: Config) -> Config:
    """`rope_freqs`, in which a converter has put Llama 3's scaling: LongRoPE with one set of factors says the same."""
    if ROPE_FREQS not in file.factors:
        return {}
    divisors = _divisors(file.factors[ROPE_FREQS])
    if all(divisor == 1.0 for divisor in divisors):
        return {}
    if "rope_scaling" in config:
        file.reader.problems.append(f"it has both {ROPE_FREQS} and {file.reader.key('{}.rope.scaling.type')}")
    return {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"],
        }
    }


def _divisors(factors: Tensor) -> list[float]:
    return [float(str(factor)) for factor in factors.astype(np.float32)]  # the shortest number that is this float32


def _llama(file: Described, config: Config) -> Config:
    """Mistral, where it has a window; Mixtral, where it has experts, whose weights llama.cpp always renormalizes."""
    _require_whole_heads(file.reader, config)
    own = _frequency_factors(file, config)
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    if file.architecture is MIXTRAL:
        counts = {"num_local_experts": "{}.expert_count", "num_experts_per_tok": "{}.expert_used_count"}
        return (
            own | {name: file.reader.integer(key) for name, key in counts.items()} | {"sliding_window": window or None}
        )
    if window:
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return own | mistral
    return own | {
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in file.shapes,
    }


def _qwen2(file: Described, config: Config) -> Config:
    _require_whole_heads(file.reader, config)
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    if 0 < window < config["max_position_embeddings"]:
        file.reader.problems.append(
            f"{file.reader.key('{}.attention.sliding_window')} is {window}: which layers have it, the file does not say"
        )
    return _frequency_factors(file, config)


def _qwen3(file: Described, config: Config) -> Config:
    return _qwen2(file, config) | {"attention_bias": "blk.0.attn_q.bias" in file.shapes}


def _experts(file: Described, config: Config, *, renormalize: bool = False) -> Config:
    """`renormalize`: what llama.cpp does where the file does not say it."""
    reader = file.reader
    inner = file.shapes.get("blk.0.ffn_gate_exps.weight", (0, 0))[1:2] or (0,)
    return _qwen2(file, config) | {
        "num_experts": reader.integer("{}.expert_count"),
        "num_experts_per_tok": reader.integer("{}.expert_used_count"),
        "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length", inner[0]),
        "norm_topk_prob": reader.flag("{}.expert_weights_norm", renormalize),
    }


def _qwen2_moe(file: Described, config: Config) -> Config:
    inner = file.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]
    return _experts(file, config) | {
        "shared_expert_intermediate_size": file.reader.integer("{}.expert_shared_feed_forward_length", inner),
        "qkv_bias": "blk.0.attn_q.bias" in file.shapes,
    }


def _qwen3_moe(file: Described, config: Config) -> Config:
    own = _experts(file, config, renormalize=True)
    return own | {"attention_bias": "blk.0.attn_q.bias" in file.shapes}


def _gemma(file: Described, config: Config) -> Config:
    _require_whole_heads(file.reader, config)
    by_width = config["num_hidden_layers"] == GEMMA_SCALE_BY_WIDTH[file.architecture.name]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        ),
    }


def _gemma2(file: Described, config: Config) -> Config:
    return _gemma(file, config) | {
        "attn_logit_softcapping": file.reader.positive("{}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.reader.positive("{}.final_logit_softcapping", 30.0),
        "sliding_window": file.reader.integer("{}.attention.sliding_window", 4096),
    }


def _gemma3(file: Described, config: Config) -> Config:
    own = _gemma(file, config) | {"rope_theta": file.reader.positive("{}.rope.freq_base", 1_000_000.0)}
    own["rope_local_base_freq"] = file.reader.positive("{}.rope.freq_base_swa", DEFAULT_THETA)
    if file.reader.has("{}.final_logit_softcapping"):
        own["final_logit_softcapping"] = file.reader.positive("{}.final_logit_softcapping")
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    if not window:
        return own | {"sliding_window_pattern": 1}  # every layer sees everything
    pattern = file.reader.integer("{}.attention.sliding_window_pattern", GEMMA3_PATTERN)
    return own | {"sliding_window": window, "sliding_window_pattern": pattern}


def _phi3(file: Described, config: Config) -> Config:
    trained = file.reader.integer("{}.rope.scaling.original_context_length", config["max_position_embeddings"])
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    turned = file.reader.integer("{}.rope.dimension_count", config["head_dim"])
    own: Config = {
        "original_max_position_embeddings": trained,
        "partial_rotary_factor": turned / config["head_dim"],
        "sliding_window": window or None,
    }
    if file.factors:
        own["rope_scaling"] = {
            "type": "longrope",
            "short_factor": _divisors(file.factors[ROPE_SHORT]) if ROPE_SHORT in file.factors else None,
            "long_factor": _divisors(file.factors[ROPE_LONG]) if ROPE_LONG in file.factors else None,
        }
        if file.reader.has("{}.rope.scaling.attn_factor"):
            own["rope_scaling"]["attention_factor"] = file.reader.positive("{}.rope.scaling.attn_factor")
    return own


def _biased(file: Described, config: Config) -> Config:
    """Biases by the tensors that there are."""
    _require_whole_heads(file.reader, config)
    return _frequency_factors(file, config) | {
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "attention_out_bias": "blk.0.attn_output.bias" in file.shapes,
        "mlp_bias": "blk.0.ffn_down.bias" in file.shapes,
    }


def _granite(file: Described, config: Config) -> Config:
    multipliers = {
        "attention_multiplier": ("{}.attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": ("{}.embedding_scale", 1.0),
        "residual_multiplier": ("{}.residual_scale", 1.0),
        "logits_scaling": ("{}.logit_scale", 1.0),
    }
    own = {name: file.reader.positive(key, default) for name, (key, default) in multipliers.items()}
    return _biased(file, config) | own


def _windows_by_layer(file: Described, config: Config) -> Config:
    """The window, and the type of each layer by a list of flags."""
    reader, count = file.reader, config["num_hidden_layers"]
    window = reader.integer("{}.attention.sliding_window", 0, minimum=0)
    slides = reader.metadata.get(reader.key("{}.attention.sliding_window_pattern"), np.zeros(count, bool))
    if not isinstance(slides, np.ndarray) or slides.dtype != bool or len(slides) != count:
        reader.problems.append(f"{reader.key('{}.attention.sliding_window_pattern')} must be {count} flags")
        slides = np.zeros(count, bool)
    types = ["sliding_attention" if slide and window else "full_attention" for slide in slides]
    return {"sliding_window": window or None, "layer_types": types}


def _olmo2(file: Described, config: Config) -> Config:
    """OLMo 3, where it has a window."""
    _require_whole_heads(file.reader, config)
    own = _windows_by_layer(file, config)
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return olmo3 | own if own["sliding_window"] else {}


def _exaone4(file: Described, config: Config) -> Config:
    _require_whole_heads(file.reader, config)
    return _frequency_factors(file, config) | _windows_by_layer(file, config)


def _part_of_heads(file: Described, config: Config) -> Config:
    turned = file.reader.integer("{}.rope.dimension_count", config["head_dim"])
    return {"partial_rotary_factor": turned / config["head_dim"]}


def _cohere2(file: Described, config: Config) -> Config:
    """Every fourth layer sees everything, in llama.cpp as in the published models."""
    _require_whole_heads(file.reader, config)
    return {
        "logit_scale": file.reader.positive("{}.logit_scale"),
        "sliding_window": file.reader.integer("{}.attention.sliding_window"),
        "sliding_window_pattern": 4,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
    }


def _starcoder2(file: Described, config: Config) -> Config:
    _require_whole_heads(file.reader, config)
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": "blk.0.attn_q.bias" in file.shapes}


def _stablelm(file: Described, config: Config) -> Config:
    return _part_of_heads(file, config) | {
        "use_qkv_bias": "blk.0.attn_q.bias" in file.shapes,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.shapes,
    }


def _nemotron(file: Described, config: Config) -> Config:
    biases = {name: f"blk.0.{tensor}.bias" in file.shapes for name, tensor in BIASED.items()}
    return _part_of_heads(file, config) | biases | {"hidden_act": "relu2"}


def _mistral3(file: Described, config: Config) -> Config:
    """Mistral Small, where nothing grows with the position."""
    reader = file.reader
    _require_whole_heads(reader, config)
    if not reader.has("{}.attention.temperature_scale"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    scaling = {"rope_theta": config["rope_theta"], **config.get("rope_scaling", {})}
    scaling["llama_4_scaling_beta"] = reader.positive("{}.attention.temperature_scale")
    if reader.has("{}.rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": reader.positive("{}.rope.scaling.yarn_log_multiplier")}
    return {"rope_parameters": scaling, "rope_scaling": None, "sliding_window": None}


def _gemma1(file: Described, config: Config) -> Config:
    _require_whole_heads(file.reader, config)
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _glm4(file: Described, config: Config) -> Config:
    return _part_of_heads(file, config) | {"attention_bias": "blk.0.attn_q.bias" in file.shapes}


OWN: Mapping[str, Callable[[Described, Config], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _experts,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "exaone4": _exaone4,
    "granite": _granite,
    "smollm3": _biased,
    "seed_oss": _biased,
    "glm4": _glm4,
    "ernie4_5": _biased,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "mistral3": _mistral3,
    "hunyuan-dense": _biased,
    "gemma": _gemma1,
}
