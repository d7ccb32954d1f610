"""The config.json keys of mixtures of experts beyond the common ones, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmserve.checkpoint.gguf.described import Config, Described
from llmserve.checkpoint.gguf.families import (
    WINDOWS,
    biased,
    exaone4,
    granite,
    lfm2,
    part_of_heads,
    phi3,
    qwen2,
    require_whole_heads,
)
from llmserve.checkpoint.gguf.tensor_names import CORRECTION

CHUNK, UNTURNED_INTERVAL, EXPERTS_OF_MAVERICK = 8192, 4, 128  # of Llama 4
SOFTMAX, SIGMOID = 1, 2
GATING = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
LOG_MULTIPLIER = "{}.rope.scaling.yarn_log_multiplier"  # of DeepSeek: a tenth of mscale_all_dim
PHIMOE_SCALE = 1.243163121016122


def _experts(file: Described, config: Config, *, renormalize: bool = False) -> Config:
    """`renormalize`: llama.cpp's behaviour if the file does not say."""
    reader = file.reader
    inner = file.shapes.get("blk.0.ffn_gate_exps.weight", (0, 0))[1:2] or (0,)
    return qwen2(file, config) | {
        **file.experts("num_experts"),
        "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length", inner[0]),
        "norm_topk_prob": reader.flag("{}.expert_weights_norm", renormalize),
    }


def _qwen2_moe(file: Described, config: Config) -> Config:
    inner = file.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]
    return _experts(file, config) | {
        "shared_expert_intermediate_size": file.reader.integer("{}.expert_shared_feed_forward_length", inner),
        "qkv_bias": file.has_bias("attn_q"),
    }


def _qwen3_moe(file: Described, config: Config) -> Config:
    own = _experts(file, config, renormalize=True)
    return own | {"attention_bias": file.has_bias("attn_q")}


def routed(file: Described, gating: int = SIGMOID) -> Config:
    """For mixtures whose router chooses among groups."""
    reader = file.reader
    if reader.integer("{}.expert_gating_func", gating, minimum=0) not in (0, gating):
        reader.problems.append(f"{reader.key('{}.expert_gating_func')} must be {gating}, {GATING[gating]}")
    return {
        **file.experts("n_routed_experts"),
        "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        "norm_topk_prob": reader.flag("{}.expert_weights_norm", False),
        "routed_scaling_factor": reader.positive("{}.expert_weights_scale", 1.0),
        "n_group": reader.integer("{}.expert_group_count", 1),
        "topk_group": reader.integer("{}.expert_group_used_count", 1),
    }


def _routed(file: Described, gating: int = SIGMOID) -> Config:
    """DeepSeek's additional keys."""
    return routed(file, gating) | {
        "n_shared_experts": file.reader.integer("{}.expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": file.reader.integer("{}.leading_dense_block_count", 0, minimum=0),
        "attention_bias": file.has_bias("attn_q"),
    }


def _glm4_moe(file: Described, config: Config) -> Config:
    """The last blocks draft tokens."""
    num_drafting = file.reader.integer("{}.nextn_predict_layers", 0, minimum=0)
    return part_of_heads(file, config) | _routed(file) | {
        "num_hidden_layers": max(1, config["num_hidden_layers"] - num_drafting),
        "num_nextn_predict_layers": num_drafting,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.shapes,
    }  # fmt: skip


def _deepseek2(file: Described, config: Config) -> Config:
    """V2; V3 if its router weighs by sigmoids, and then also Kimi K2 or GLM-4.7-Flash, which are the same network.

    As in llama.cpp: no groups if the file does not say, and cosines and sines without YaRN's factor.
    """
    reader, num_layers = file.reader, config["num_hidden_layers"]
    has_correction = any(name.endswith(f".{CORRECTION}") for name in file.shapes)
    gating = reader.integer("{}.expert_gating_func", 0, minimum=0) or (SIGMOID if has_correction else SOFTMAX)
    is_v3 = gating == SIGMOID
    rotary_dim, num_heads = reader.integer("{}.rope.dimension_count"), config["num_attention_heads"]
    key_dim, value_dim = (
        reader.integer(f"{{}}.attention.{n}_length_mla", reader.integer(f"{{}}.attention.{n}_length"))
        for n in ("key", "value")
    )
    own = _routed(file, SIGMOID if is_v3 else SOFTMAX)
    num_drafting = reader.integer("{}.nextn_predict_layers", 0, minimum=0)
    if not is_v3:
        own["topk_method"] = "greedy" if own["n_group"] == 1 else "group_limited_greedy"
    if "rope_scaling" in config:
        own["rope_scaling"] = {**config["rope_scaling"], "attention_factor": 1.0}
        value = reader.metadata.get(reader.key(LOG_MULTIPLIER), 0.0)
        if not isinstance(value, float) or value:
            own["rope_scaling"]["mscale_all_dim"] = round(10 * reader.positive(LOG_MULTIPLIER), 6)
    return own | {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_hidden_layers": max(1, num_layers - num_drafting),
        "num_nextn_predict_layers": num_drafting,
        "num_key_value_heads": num_heads,
        "head_dim": rotary_dim,
        "q_lora_rank": reader.integer("{}.attention.q_lora_rank", 0, minimum=0) or None,
        "kv_lora_rank": reader.integer("{}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "v_head_dim": value_dim,
        "attention_bias": False,
    }


def _dots1(file: Described, config: Config) -> Config:
    require_whole_heads(file.reader, config)
    layers = ["full_attention"] * config["num_hidden_layers"]
    return _routed(file) | {"layer_types": layers, "sliding_window": None}


def _afmoe(file: Described, config: Config) -> Config:
    """llama.cpp's constants, as in the published models: which layers have a window, and the scale of inputs."""
    reader = file.reader
    require_whole_heads(reader, config)
    own = routed(file)
    return {
        **file.experts("num_experts"),
        "moe_intermediate_size": own["moe_intermediate_size"],
        "num_expert_groups": own["n_group"],
        "route_norm": own["norm_topk_prob"],
        "route_scale": own["routed_scaling_factor"],
        "num_shared_experts": reader.integer("{}.expert_shared_count"),
        "num_dense_layers": reader.integer("{}.leading_dense_block_count", 0, minimum=0),
        "sliding_window": reader.integer("{}.attention.sliding_window"),
        "global_attn_every_n_layers": reader.integer(WINDOWS, 4),
        "mup_enabled": True,
    }


def _exaone_moe(file: Described, config: Config) -> Config:
    """The last blocks draft tokens."""
    reader = file.reader
    num_layers = max(1, config["num_hidden_layers"] - reader.integer("{}.nextn_predict_layers", 0, minimum=0))
    windows = exaone4(file, config)
    return windows | _routed(file) | {
        **file.experts("num_experts"),
        "num_hidden_layers": num_layers,
        "layer_types": windows["layer_types"][:num_layers],
        "num_shared_experts": reader.integer("{}.expert_shared_count"),
    }  # fmt: skip


def _minimax_m2(file: Described, config: Config) -> Config:
    reader = file.reader
    return {
        **file.experts("num_local_experts"),
        "intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        "rotary_dim": reader.integer("{}.rope.dimension_count", config["head_dim"]),
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
    }


def _ernie4_5_moe(file: Described, config: Config) -> Config:
    reader = file.reader
    require_whole_heads(reader, config)
    return {
        **file.experts("moe_num_experts", "moe_k"),
        "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        "moe_num_shared_experts": reader.integer("{}.expert_shared_count", 0, minimum=0),
        "moe_layer_start_index": reader.integer("{}.leading_dense_block_count", 0, minimum=0),
        "moe_layer_interval": reader.integer("{}.interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(file: Described, config: Config) -> Config:
    reader = file.reader
    return biased(file, config) | {
        **file.experts("num_experts", "moe_topk"),
        "intermediate_size": reader.integer("{}.expert_feed_forward_length", config["intermediate_size"]),
    }


def _granite_moe(file: Described, config: Config) -> Config:
    return granite(file, config) | file.experts("num_local_experts")


def _gpt_oss(file: Described, config: Config) -> Config:
    """Every second layer has a window, as in the published models."""
    reader = file.reader
    require_whole_heads(reader, config)
    scaling = config.get("rope_scaling")
    return {
        **file.experts("num_local_experts"),
        "intermediate_size": reader.integer("{}.expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": reader.integer("{}.attention.sliding_window", 128),
        "attention_bias": file.has_bias("attn_q"),
        "rope_scaling": scaling and {**scaling, "truncate": False},
    }


def _llama4(file: Described, config: Config) -> Config:
    """llama.cpp's constants, as in the published models: the stretch of frequencies, layers without rotation, and how
    queries grow. With 128 experts (Maverick), heads are not normed."""
    reader = file.reader
    for key, known in (("{}.attention.sliding_window", CHUNK), (WINDOWS, UNTURNED_INTERVAL)):
        if reader.integer(key, known, minimum=0) != known:
            reader.problems.append(f"{reader.key(key)} must be {known}")
    num_experts = reader.integer("{}.expert_count")
    return biased(file, config) | {
        "num_local_experts": num_experts,
        "num_experts_per_tok": reader.integer("{}.expert_used_count"),
        "intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": reader.integer("{}.interleave_moe_layer_step"),
        "no_rope_layer_interval": UNTURNED_INTERVAL,
        "attention_chunk_size": CHUNK,
        "use_qk_norm": num_experts != EXPERTS_OF_MAVERICK,
    }


def _phimoe(file: Described, config: Config) -> Config:
    """The factor of cosines and sines is Phi-3.5-MoE's, because converters write Phi-3's."""
    own = phi3(file, config)
    if "rope_scaling" in own:
        own["rope_scaling"] = {
            **{key: value for key, value in own["rope_scaling"].items() if key != "attention_factor"},
            "short_mscale": PHIMOE_SCALE,
            "long_mscale": PHIMOE_SCALE,
        }
    return own | {
        **file.experts("num_local_experts"),
        "attention_bias": file.has_bias("attn_q"),
        "lm_head_bias": "output.bias" in file.shapes,
    }


def _lfm2_moe(file: Described, config: Config) -> Config:
    """llama.cpp always renormalizes the weights, and has no factor for them."""
    reader = file.reader
    if reader.integer("{}.expert_gating_func", 2, minimum=0) != 2:
        reader.problems.append(f"{reader.key('{}.expert_gating_func')} must be 2, sigmoid")
    return lfm2(file, config) | {
        **file.experts("num_experts"),
        "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        "num_dense_layers": reader.integer("{}.leading_dense_block_count", 0, minimum=0),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": any(name.endswith(f".{CORRECTION}") for name in file.shapes),
    }


OWN: Mapping[str, Callable[[Described, Config], Config]] = {
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _experts,
    "glm4moe": _glm4_moe,
    "afmoe": _afmoe,
    "exaone-moe": _exaone_moe,
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "minimax-m2": _minimax_m2,
    "ernie4_5-moe": _ernie4_5_moe,
    "hunyuan-moe": _hunyuan_moe,
    "granitemoe": _granite_moe,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "phimoe": _phimoe,
    "lfm2moe": _lfm2_moe,
}
