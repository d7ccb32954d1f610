"""The config.json keys of dense families beyond the common ones, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from llmserve.checkpoint.gguf.architectures import MIXTRAL, ROPE_LONG, ROPE_SHORT
from llmserve.checkpoint.gguf.described import Config, Described
from llmserve.checkpoint.gguf.metadata import MAX_LAYERS, MetadataReader
from llmserve.checkpoint.gguf.tensor_names import ROPE_FREQS
from llmserve.checkpoint.stored_tensor import Tensor

DEFAULT_THETA = 10_000.0
KV_HEADS, MLP_SIZE = "{}.attention.head_count_kv", "{}.feed_forward_length"
WINDOWS = "{}.attention.sliding_window_pattern"
GEMMA_SCALE_BY_WIDTH = {
    "gemma2": 46,
    "gemma3": 62,
}  # layers of the 27B models, which scale attention by another rule
GEMMA3_PATTERN = 6
BIASED = {"attention_bias": "attn_q", "mlp_bias": "ffn_down"}


def require_whole_heads(reader: MetadataReader, config: Config) -> None:
    """Require that rotary embeddings cover whole heads."""
    if reader.integer("{}.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        reader.problems.append(
            f"{reader.key('{}.rope.dimension_count')} must be the head size ({config['head_dim']}): partly "
            "rotated heads are not supported"
        )


def _frequency_factors(file: Described, config: Config) -> Config:
    """`rope_freqs`, where converters store Llama 3's scaling; LongRoPE with one set of factors is equivalent."""
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
    return [float(str(factor)) for factor in factors.astype(np.float32)]  # the shortest decimal for this float32


def _llama(file: Described, config: Config) -> Config:
    """Mistral if it has a window; Mixtral if it has experts, whose weights llama.cpp always renormalizes."""
    require_whole_heads(file.reader, config)
    own = _frequency_factors(file, config)
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    if file.architecture is MIXTRAL:
        return own | file.experts("num_local_experts") | {"sliding_window": window or None}
    if window:
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return own | mistral
    return own | {
        "attention_bias": file.has_bias("attn_q"),
        "mlp_bias": file.has_bias("ffn_down"),
    }


def qwen2(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    if 0 < window < config["max_position_embeddings"]:
        file.reader.problems.append(
            f"{file.reader.key('{}.attention.sliding_window')} is {window}, but the file does not name its layers"
        )
    return _frequency_factors(file, config)


def _qwen3(file: Described, config: Config) -> Config:
    return qwen2(file, config) | {"attention_bias": file.has_bias("attn_q")}


def _gemma(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
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
        return own | {"sliding_window_pattern": 1}  # every layer has full attention
    pattern = file.reader.integer("{}.attention.sliding_window_pattern", GEMMA3_PATTERN)
    return own | {"sliding_window": window, "sliding_window_pattern": pattern}


def phi3(file: Described, config: Config) -> Config:
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


def biased(file: Described, config: Config) -> Config:
    """Biases, according to the tensors in the file."""
    require_whole_heads(file.reader, config)
    return _frequency_factors(file, config) | {
        "attention_bias": file.has_bias("attn_q"),
        "attention_out_bias": file.has_bias("attn_output"),
        "mlp_bias": file.has_bias("ffn_down"),
    }


def granite(file: Described, config: Config) -> Config:
    multipliers = {
        "attention_multiplier": ("{}.attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": ("{}.embedding_scale", 1.0),
        "residual_multiplier": ("{}.residual_scale", 1.0),
        "logits_scaling": ("{}.logit_scale", 1.0),
    }
    own = {name: file.reader.positive(key, default) for name, (key, default) in multipliers.items()}
    return biased(file, config) | own


def _windows_by_layer(file: Described, config: Config) -> Config:
    """The window, and the type of each layer from a list of flags."""
    window = file.reader.integer("{}.attention.sliding_window", 0, minimum=0)
    slides = flags_of_layers(file.reader, WINDOWS, config["num_hidden_layers"])
    types = ["sliding_attention" if slide and window else "full_attention" for slide in slides]
    return {"sliding_window": window or None, "layer_types": types}


def flags_of_layers(reader: MetadataReader, key: str, count: int) -> list[bool]:
    """One flag per layer; all false if the file has none."""
    none = [False] * min(count, MAX_LAYERS)
    flags = reader.metadata.get(reader.key(key), np.array(none))
    if not isinstance(flags, np.ndarray) or flags.dtype != bool or len(flags) != count:
        reader.problems.append(f"{reader.key(key)} must be {count} flags")
        return none
    return [bool(flag) for flag in flags]


def _olmo2(file: Described, config: Config) -> Config:
    """OLMo 3 if it has a window."""
    require_whole_heads(file.reader, config)
    own = _windows_by_layer(file, config)
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return olmo3 | own if own["sliding_window"] else {}


def exaone4(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
    return _frequency_factors(file, config) | _windows_by_layer(file, config)


def part_of_heads(file: Described, config: Config) -> Config:
    turned = file.reader.integer("{}.rope.dimension_count", config["head_dim"])
    return {"partial_rotary_factor": turned / config["head_dim"]}


def _cohere2(file: Described, config: Config) -> Config:
    """Every fourth layer has full attention, as in llama.cpp and the published models."""
    require_whole_heads(file.reader, config)
    return {
        "logit_scale": file.reader.positive("{}.logit_scale"),
        "sliding_window": file.reader.integer("{}.attention.sliding_window"),
        "sliding_window_pattern": 4,
        "attention_bias": file.has_bias("attn_q"),
    }


def _command_r(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
    return {
        "logit_scale": file.reader.positive("{}.logit_scale"),
        "attention_bias": file.has_bias("attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }


def _starcoder2(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": file.has_bias("attn_q")}


def _stablelm(file: Described, config: Config) -> Config:
    return part_of_heads(file, config) | {
        "use_qkv_bias": file.has_bias("attn_q"),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.shapes,
    }


def _nemotron(file: Described, config: Config) -> Config:
    biases = {name: file.has_bias(tensor) for name, tensor in BIASED.items()}
    return part_of_heads(file, config) | biases | {"hidden_act": "relu2"}


def _mistral3(file: Described, config: Config) -> Config:
    """Mistral Small if nothing grows with the position."""
    reader = file.reader
    require_whole_heads(reader, config)
    if not reader.has("{}.attention.temperature_scale"):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    scaling = {"rope_theta": config["rope_theta"], **config.get("rope_scaling", {})}
    scaling["llama_4_scaling_beta"] = reader.positive("{}.attention.temperature_scale")
    if reader.has("{}.rope.scaling.yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": reader.positive("{}.rope.scaling.yarn_log_multiplier")}
    return {"rope_parameters": scaling, "rope_scaling": None, "sliding_window": None}


def _phi2(file: Described, config: Config) -> Config:
    return part_of_heads(file, config) | {"hidden_act": "gelu_new"}


def _gemma1(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _glm4(file: Described, config: Config) -> Config:
    """Converters order the queries and keys of GLM-4.1V and 4.6V differently."""
    if file.reader.has(sections := "{}.rope.dimension_sections"):
        file.reader.problems.append(f"metadata {file.reader.key(sections)}: language models of GLM-V are not supported")
    return part_of_heads(file, config) | {"attention_bias": file.has_bias("attn_q")}


def lfm2(file: Described, config: Config) -> Config:
    """Layers without KV heads are convolutions."""
    require_whole_heads(file.reader, config)
    counts = file.reader.counts(KV_HEADS, config["num_hidden_layers"])
    heads = sorted({*counts} - {0})
    if len(heads) != 1:
        file.reader.problems.append(f"{file.reader.key(KV_HEADS)} must be one number, or 0 for a convolution")
    return {
        "num_key_value_heads": max(1, *heads, 1),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": file.reader.integer("{}.shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in file.shapes),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,  # the converter has applied it
    }


def _squared(file: Described, config: Config) -> Config:
    return biased(file, config) | {"hidden_act": "relu2"}


OWN: Mapping[str, Callable[[Described, Config], Config]] = {
    "llama": _llama,
    "qwen2": qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": phi3,
    "olmo": biased,
    "olmo2": _olmo2,
    "exaone4": exaone4,
    "granite": granite,
    "smollm3": biased,
    "arcee": _squared,
    "seed_oss": biased,
    "glm4": _glm4,
    "ernie4_5": biased,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "jais2": _squared,
    "phi2": _phi2,
    "nemotron": _nemotron,
    "mistral3": _mistral3,
    "hunyuan-dense": biased,
    "internlm2": biased,
    "gemma": _gemma1,
    "lfm2": lfm2,
}
