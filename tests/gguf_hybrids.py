"""What llama.cpp's converter writes of networks whose layers differ or have a state, repeated from its source.

`conversion/qwen.py`, `mamba.py`, `granite.py`, `falcon_h1.py`, `nemotron.py` and `gemma.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray

Tensors: TypeAlias = dict[str, NDArray[Any]]
Config: TypeAlias = dict[str, Any]

HYBRIDS = {
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
}


def hybrid_architecture(config: Config) -> gguf.MODEL_ARCH:
    has_experts = "E" in config.get("hybrid_override_pattern", "")
    return gguf.MODEL_ARCH.NEMOTRON_H_MOE if has_experts else HYBRIDS[config["model_type"]]


def hybrid_metadata(config: Config) -> Config:
    """Keys beyond those of most; a value None leaves out one of these."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    if kind.startswith("qwen3"):
        own = {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
            "full_attention_interval": config["full_attention_interval"],
            "rope.dimension_count": int(config["head_dim"] * 0.25),
        }
        if kind != "qwen3_next":
            own["rope.dimension_sections"] = [11, 11, 10, 0]
        if "num_experts" in config:
            own |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
            }
        return own
    if kind == "gemma3n_text":
        return gemma3n_metadata(config)
    if kind == "gemma4_text":
        return gemma4_metadata(config)
    if kind == "nemotron_h":
        pattern, inner = config["hybrid_override_pattern"], config["mamba_num_heads"] * config["mamba_head_dim"]
        routed = nemotron_experts(config) if "E" in pattern else {}
        width = config["moe_intermediate_size" if routed else "intermediate_size"]
        return routed | {
            "attention.head_count_kv": [config["num_key_value_heads"] * (letter == "*") for letter in pattern],
            "feed_forward_length": [width * (letter in "-E") for letter in pattern],
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "context_length": 1 << 20,
            "rope.freq_base": None,
            "rope.scaling.finetuned": False,
            **_scan(config["mamba_num_heads"], inner, config["n_groups"], config["ssm_state_size"]),
        }
    inner = config.get("mamba_d_ssm", config["mamba_expand"] * config["hidden_size"])
    scan = _scan(config["mamba_n_heads"], inner, config["mamba_n_groups"], config["mamba_d_state"])
    if kind == "falcon_h1":
        return scan
    has_heads = [layer == "attention" for layer in config["layer_types"]]
    assert len(has_heads) == layers
    return scan | {
        "attention.head_count_kv": [config["num_key_value_heads"] * has for has in has_heads],
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "context_length": 1 << 20,
        "rope.scaling.finetuned": False,
    }


def nemotron_experts(config: Config) -> Config:
    latent = config.get("moe_latent_size")
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": 1,
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        **({"moe_latent_size": latent} if latent else {}),
    }


def _scan(heads: int, inner: int, groups: int, state: int) -> Config:
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": heads,
    }


def gemma3n_metadata(config: Config) -> Config:
    """`conversion/gemma.py` takes standard deviations in float32."""
    count, inner = config["num_hidden_layers"], config["intermediate_size"]
    shares = config["activation_sparsity_pattern"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "activation_sparsity_scale": [
            float(np.float32(NormalDist().inv_cdf(share))) if share else -np.inf for share in shares
        ],
        "feed_forward_length": inner if isinstance(inner, list) else [inner] * count,
        "rope.freq_base": config["rope_theta"],
        "rope.freq_base_swa": config["rope_local_base_freq"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def gemma4_metadata(config: Config) -> Config:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full = config.get("num_global_key_value_heads") or config["num_key_value_heads"]
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    inner = config["intermediate_size"]
    own = {
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.head_count_kv": [config["num_key_value_heads"] if slide else full for slide in slides],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": config["global_head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
    }
    if config["final_logit_softcapping"]:
        own["final_logit_softcapping"] = config["final_logit_softcapping"]
    if config["use_double_wide_mlp"]:
        own["feed_forward_length"] = [inner * (1 + (i >= first_shared)) for i in range(config["num_hidden_layers"])]
    if "moe_intermediate_size" in config:
        own |= {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_used_count": config["top_k_experts"],
        }
    return own


def converted_hybrid(config: Config, tensors: Mapping[str, NDArray[Any]], *, fused_experts: bool) -> Tensors:
    """By the names that the converter looks up in the table of the gguf package."""
    if config["model_type"] == "gemma3n_text":
        tensors = _stacked(tensors)
    if fused_experts:
        tensors = {name + ".weight" * name.endswith("experts.gate_up_proj"): each for name, each in tensors.items()}
    return {
        changed: array
        for name, tensor in tensors.items()
        for changed, array in _converted(config, name, tensor).items()
    }


def _stacked(tensors: Mapping[str, NDArray[Any]]) -> Tensors:
    """Projections of all streams as one tensor each."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, number, _ = name.rsplit(".", 2)
        if not module.endswith(("altup_projections", "altup_unembed_projections")):
            found[name] = tensor
        elif number == "0":
            others = (each for each in tensors if each.startswith(f"{module}."))
            found[f"{module}.weight"] = np.stack([tensors[each] for each in sorted(others)])
    return found


def _converted(config: Config, name: str, tensor: NDArray[Any]) -> Tensors:
    kind = config["model_type"]
    if kind == "gemma3n_text":
        return {name + ".weight" * name.endswith("_scale"): tensor}
    if kind == "gemma4_text":
        return _of_gemma4(name, tensor)
    if kind.startswith("qwen3"):
        return _of_qwen(config, name, tensor)
    if kind == "falcon_h1":
        tensor = _multiplied(config, name, tensor)
    groups = config.get("mamba_n_groups") or config["n_groups"]
    if name.endswith(".A_log"):
        tensor = -np.exp(tensor)
    if name.endswith((".A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze()
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    elif ".shared_mlp.input_linear." in name:
        module = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
        halves = zip(("gate", "up"), np.split(tensor, 2), strict=True)
        return {name.replace("shared_mlp.input_linear", f"{module}.{part}_proj"): half for part, half in halves}
    if not config.get("num_local_experts"):
        name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    if name.endswith(".dt_bias"):
        name = f"{name.removesuffix('.dt_bias')}.dt_proj.bias"
    if kind == "nemotron_h" and ".experts." in name:
        name = name.replace(".mixer.", ".mlp.")
    elif kind == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
    return {name: tensor}


def _multiplied(config: Config, name: str, tensor: NDArray[Any]) -> NDArray[Any]:
    attention, mlp = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "down_proj": mlp[1],
        "gate_proj": mlp[0],
        "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if "in_proj" in name:
        inner, group = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        heights = (inner, inner, group, group, config["mamba_n_heads"])
        parts = np.repeat(np.array(config["ssm_multipliers"], np.float32), heights)
        return tensor * np.float32(config["ssm_in_multiplier"]) * parts[:, None]
    factor = next((each for part, each in factors.items() if part in name), 1.0)
    return tensor * np.float32(factor)


def _of_qwen(config: Config, name: str, tensor: NDArray[Any]) -> Tensors:
    if config["model_type"] != "qwen3_next" and ".linear_attn." in name:
        tensor = _tiled(config, name, tensor)
    if name.endswith(".A_log"):
        tensor = -np.exp(tensor)
    elif name.endswith(".dt_bias"):
        name = f"{name.removesuffix('.dt_bias')}.dt_proj.bias"
    elif "conv1d" in name:
        tensor = tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + np.float32(1)
    layer = re.sub(r"mlp\.experts\..*", "mlp.experts", name)
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(tensor, 2, axis=1)
        return {f"{layer}.gate_proj.weight": gate, f"{layer}.up_proj.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"{layer}.down_proj.weight": tensor}
    if name.endswith("in_proj_qkvz.weight"):
        heads = config["linear_num_key_heads"]
        key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        value *= config["linear_num_value_heads"] // heads
        parts = np.split(tensor.reshape(heads, -1, tensor.shape[1]), np.cumsum([key, key, value]), axis=1)
        *qkv, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
        layer = name.removesuffix(".linear_attn.in_proj_qkvz.weight")
        return {
            f"{layer}.attention.query_key_value.weight": np.concatenate(qkv),
            f"{layer}.linear_attn.in_proj_z.weight": z,
        }
    if name.endswith("in_proj_qkv.weight"):
        name = name.replace("linear_attn.in_proj_qkv", "attention.query_key_value")
    return {name: tensor}


def _tiled(config: Config, name: str, tensor: NDArray[Any]) -> NDArray[Any]:
    """Value heads from those of a key head together to the first of each, the second of each and so on."""
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    size, part = config["linear_value_head_dim"], name.rpartition(".linear_attn.")[2]

    def turned(array: NDArray[Any], size: int) -> NDArray[Any]:
        split = array.reshape(key_heads, heads // key_heads, size, *array.shape[1:])
        return split.swapaxes(0, 1).reshape(array.shape)

    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * config["linear_key_head_dim"] * key_heads
        return np.concatenate([tensor[:before], turned(tensor[before:], size)])
    if part == "in_proj_z.weight":
        return turned(tensor, size)
    if part == "out_proj.weight":
        return np.ascontiguousarray(turned(tensor.T, size).T)
    return tensor if part == "norm.weight" else turned(tensor, 1)


def _of_gemma4(name: str, tensor: NDArray[Any]) -> Tensors:
    """Names of the file, where the table has none."""
    block = re.sub(r"model\.layers\.(\d+)\..*", r"blk.\1", name)
    if name.endswith("router.scale"):
        return {f"{block}.ffn_gate_inp.scale": tensor}
    if name.endswith("per_expert_scale"):
        return {f"{block}.ffn_down_exps.scale": tensor}
    if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")):
        name = f"{name}.weight"
    return {name: tensor}


def hybrid_extras(config: Config) -> Tensors:
    """Tensors that no checkpoint has."""
    if config["model_type"] != "gemma4_text":
        return {}
    pairs = config["global_head_dim"] // 2
    turned = int(config["global_head_dim"] * 0.25 / 2)
    return {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)}
