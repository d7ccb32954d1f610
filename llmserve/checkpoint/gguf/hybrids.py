"""The config.json keys of networks with a state or with different layers, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from llmserve.checkpoint.gguf.architectures import GRANITE_H_MOE
from llmserve.checkpoint.gguf.described import Config, Described
from llmserve.checkpoint.gguf.families import (
    DEFAULT_THETA,
    KV_HEADS,
    MLP_SIZE,
    WINDOWS,
    flags_of_layers,
    granite,
    part_of_heads,
    require_whole_heads,
)
from llmserve.checkpoint.gguf.metadata import MAX_LAYERS, MetadataReader
from llmserve.checkpoint.gguf.mixtures import routed
from llmserve.checkpoint.gguf.tensor_names import ROPE_FREQS

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
UNTURNED = 1e30  # a factor of this size or more leaves nothing of a frequency
OLD_JOINED = "ssm_in.weight"  # Qwen3-Next's joined queries, keys, values and gates
TURNS, STATEFUL = "{}.rope.scaling.finetuned", "{}.attention.recurrent_layers"


@dataclass(frozen=True, slots=True)
class Scan:
    """The keys of layers with a state."""

    inner: int
    heads: int
    groups: int
    state: int
    taps: int

    @property
    def head_dim(self) -> int:
        return max(1, self.inner // self.heads)


def _scan(reader: MetadataReader) -> Scan:
    names = ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel")
    inner, heads, *others = (reader.integer(f"{{}}.ssm.{name}") for name in names)
    if inner % heads:
        reader.problems.append(
            f"{reader.key('{}.ssm.inner_size')} ({inner}) must be a multiple of "
            f"{reader.key('{}.ssm.time_step_rank')} ({heads})"
        )
    return Scan(inner, heads, *others)


def _ends(file: Described, name: str) -> bool:
    """Whether any block has this tensor."""
    return any(tensor.endswith(f".{name}") for tensor in file.shapes)


def _one_of(reader: MetadataReader, key: str, counts: Sequence[int]) -> int:
    """The number that some layers have; the other layers have 0."""
    found = sorted({*counts} - {0})
    if len(found) != 1:
        reader.problems.append(f"{reader.key(key)} must be one number, or 0 for layers without it")
    return max((1, *found))


def _mamba(file: Described, hidden_size: int) -> Config:
    scan = _scan(file.reader)
    return {
        "mamba_n_heads": scan.heads,
        "mamba_d_head": scan.head_dim,
        "mamba_n_groups": scan.groups,
        "mamba_d_state": scan.state,
        "mamba_d_conv": scan.taps,
        "mamba_d_ssm": scan.inner,
        "mamba_expand": max(1, scan.inner // hidden_size),
        "mamba_conv_bias": _ends(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _ends(file, "ssm_in.bias"),
    }


def _granite_hybrid(file: Described, config: Config) -> Config:
    """Layers without KV heads are Mamba layers."""
    reader = file.reader
    counts = reader.counts(KV_HEADS, config["num_hidden_layers"])
    if reader.flag(TURNS, True) and 0 in counts:
        reader.problems.append(f"{reader.key(TURNS)} is true: Bamba is not supported as GGUF; build it from its folder")
    own: Config = {
        "num_key_value_heads": _one_of(reader, KV_HEADS, counts),
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "position_embedding_type": "rope" if reader.flag(TURNS, True) else "nope",
        "attention_bias": _ends(file, "attn_q.bias"),
        "shared_intermediate_size": config["intermediate_size"],
        "num_local_experts": 0,
    }
    if file.architecture is GRANITE_H_MOE:
        own |= {
            "shared_intermediate_size": reader.integer("{}.expert_shared_feed_forward_length"),
            **file.experts("num_local_experts"),
        }
    return granite(file, config) | _mamba(file, config["hidden_size"]) | own


def _falcon_h1(file: Described, config: Config) -> Config:
    """Weights include the multipliers. llama.cpp norms after the gate."""
    reader = file.reader
    require_whole_heads(reader, config)
    if config["tie_word_embeddings"]:
        reader.problems.append("it has no tensor output.weight: a head tied to the embedding has lost its multiplier")
    return _mamba(file, config["hidden_size"]) | {
        "attention_bias": file.has_bias("attn_q"),
        "mlp_bias": file.has_bias("ffn_down"),
        "projectors_bias": file.has_bias("ssm_out"),
        "mamba_rms_norm": _ends(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


def _nemotron_h(file: Described, config: Config) -> Config:
    """Layers with KV heads are attention, those with a width are an MLP or experts, and others are Mamba layers."""
    reader, mlp = file.reader, "E" if file.architecture.name.endswith("moe") else "-"
    num_drafting = reader.integer("{}.nextn_predict_layers", 0, minimum=0) if file.architecture.drops_drafting else 0
    count = max(1, config["num_hidden_layers"] - num_drafting)
    heads, widths = (reader.counts(key, config["num_hidden_layers"])[:count] for key in (KV_HEADS, MLP_SIZE))
    if any(map(min, heads, widths)):
        reader.problems.append(f"{reader.key(KV_HEADS)} and {reader.key(MLP_SIZE)} must not both be set for one layer")
    kinds = ["*" if kv_heads else mlp if width else "M" for kv_heads, width in zip(heads, widths, strict=True)]
    scan = _scan(reader)
    return {
        "num_hidden_layers": count,
        "hybrid_override_pattern": "".join(kinds),
        "num_key_value_heads": _one_of(reader, KV_HEADS, heads),
        "intermediate_size": _one_of(reader, MLP_SIZE, widths),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": scan.heads,
        "mamba_head_dim": scan.head_dim,
        "n_groups": scan.groups,
        "ssm_state_size": scan.state,
        "conv_kernel": scan.taps,
        "use_conv_bias": _ends(file, "ssm_conv1d.bias"),
        "use_bias": _ends(file, "ssm_in.bias"),
        "mlp_bias": _ends(file, "ffn_up.bias"),
        "mlp_hidden_act": "relu2",
    }


def _nemotron_h_moe(file: Described, config: Config) -> Config:
    reader = file.reader
    has_latent = reader.has("{}.moe_latent_size")
    return _nemotron_h(file, config) | routed(file) | {
        "moe_shared_expert_intermediate_size": reader.integer("{}.expert_shared_feed_forward_length"),
        "moe_latent_size": reader.integer("{}.moe_latent_size") if has_latent else None,
    }  # fmt: skip


def _qwen35(file: Described, config: Config) -> Config:
    """The last blocks draft tokens. By default, every fourth layer has attention."""
    reader = file.reader
    count = max(1, config["num_hidden_layers"] - reader.integer("{}.nextn_predict_layers", 0, minimum=0))
    interval = reader.integer("{}.full_attention_interval", 4)
    stateful = [(layer + 1) % interval != 0 for layer in range(min(count, MAX_LAYERS))]
    if reader.has(STATEFUL):
        stateful = flags_of_layers(reader, STATEFUL, config["num_hidden_layers"])[:count]
    scan = _scan(reader)
    turned = part_of_heads(file, config)["partial_rotary_factor"]
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": turned}
    return {
        "num_hidden_layers": count,
        "layer_types": [LINEAR if has_state else FULL for has_state in stateful],
        "rope_parameters": rope | config.get("rope_scaling", {}),
        "rope_scaling": None,
        "attention_bias": _ends(file, "attn_q.bias"),
        "linear_conv_kernel_dim": scan.taps,
        "linear_key_head_dim": scan.state,
        "linear_value_head_dim": scan.head_dim,
        "linear_num_key_heads": scan.groups,
        "linear_num_value_heads": scan.heads,
    }


def _qwen35_moe(file: Described, config: Config) -> Config:
    reader = file.reader
    return _qwen35(file, config) | {
        **file.experts("num_experts"),
        "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": reader.integer("{}.expert_shared_feed_forward_length"),
    }


def _qwen3_next(file: Described, config: Config) -> Config:
    if _ends(file, OLD_JOINED):
        file.reader.problems.append(
            f"it has {OLD_JOINED}, which llama.cpp's converter wrote before 2026; convert the original model again"
        )
    return _qwen35_moe(file, config)


def _gemma4(file: Described, config: Config) -> Config:
    reader, count = file.reader, config["num_hidden_layers"]
    slides, kv_heads, widths = (
        flags_of_layers(reader, WINDOWS, count),
        reader.counts(KV_HEADS, count),
        _widths(reader, count),
    )
    full, shared = config["head_dim"], reader.integer("{}.attention.shared_kv_layers", 0, minimum=0)
    head_dim = reader.integer("{}.attention.key_length_swa")
    for key, size in (("{}.attention.value_length_swa", head_dim), ("{}.rope.dimension_count_swa", head_dim)):
        if reader.integer(key, size) != size:
            reader.problems.append(f"{reader.key(key)} must be the keys' size ({size})")
    require_whole_heads(reader, config)
    own: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "sliding_window": reader.integer("{}.attention.sliding_window"),
        "head_dim": head_dim,
        "global_head_dim": full,
        "num_key_value_heads": _of_kind(reader, kv_heads, slides, True),
        "num_global_key_value_heads": _of_kind(reader, kv_heads, slides, False),
        "attention_k_eq_v": any(
            not slide and f"blk.{layer}.attn_v.weight" not in file.shapes
            for layer, slide in enumerate(slides[: max(0, count - shared)])
        ),
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": reader.integer("{}.embedding_length_per_layer_input", 0, minimum=0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": _gemma4_ropes(file, config, full),
        "final_logit_softcapping": None,
    }
    if reader.has("{}.final_logit_softcapping"):
        own["final_logit_softcapping"] = reader.positive("{}.final_logit_softcapping")
    if num_experts := reader.integer("{}.expert_count", 0, minimum=0):
        own |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": reader.integer("{}.expert_used_count"),
            "moe_intermediate_size": reader.integer("{}.expert_feed_forward_length"),
        }
    return own


def _widths(reader: MetadataReader, count: int) -> list[int]:
    """Widths of MLPs: the last layers may be twice as wide, which the plan checks."""
    found = [max(1, width) for width in reader.counts(MLP_SIZE, count)]
    if found[-1] not in (found[0], 2 * found[0]):
        reader.problems.append(f"{reader.key(MLP_SIZE)} must be one number, or twice as much for the last layers")
    return found


def _of_kind(reader: MetadataReader, kv_heads: Sequence[int], slides: Sequence[bool], kind: bool) -> int:
    found = {heads for heads, slide in zip(kv_heads, slides, strict=True) if slide is kind}
    if len(found) > 1:
        reader.problems.append(f"{reader.key(KV_HEADS)} must be the same for all layers with a window, and for others")
    return max((1, *found))


def _gemma4_ropes(file: Described, config: Config, full: int) -> Config:
    """`rope_freqs` says which pairs of heads without a window are rotated: the first ones."""
    reader, divisors = file.reader, file.factors.get(ROPE_FREQS)
    turned = 0
    if divisors is None:
        reader.problems.append(f"tensor {ROPE_FREQS} is missing")
    else:
        turned = int((divisors == 1.0).sum())
        wanted = np.where(np.arange(divisors.size) < turned, 1.0, UNTURNED).astype(np.float32)
        if divisors.shape != (full // 2,) or (np.minimum(divisors, np.float32(UNTURNED)) != wanted).any():
            reader.problems.append(f"tensor {ROPE_FREQS} must be {full // 2} factors: 1, and then {UNTURNED:g}")
    local = {"rope_type": "default", "rope_theta": reader.positive("{}.rope.freq_base_swa", DEFAULT_THETA)}
    whole = {
        "rope_type": "proportional",
        "partial_rotary_factor": 2 * turned / full,
        "rope_theta": config["rope_theta"],
    }
    return {SLIDING: local, FULL: whole}


def _gemma3n(file: Described, config: Config) -> Config:
    """Older files lack windows and the number of layers that share caches; those of the published models are used."""
    reader, count = file.reader, config["num_hidden_layers"]
    usual = [(layer + 1) % 5 != 0 for layer in range(min(count, MAX_LAYERS))]
    slides = flags_of_layers(reader, WINDOWS, count) if reader.has(WINDOWS) else usual
    require_whole_heads(reader, config)
    shapes = {name: file.shapes.get(name, (0,)) for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")}
    per_layer_rows, rank = (max(1, shape[0]) for shape in shapes.values())
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "sliding_window": reader.integer("{}.attention.sliding_window"),
        "num_key_value_heads": reader.integer(KV_HEADS),
        "intermediate_size": [max(1, width) for width in reader.counts(MLP_SIZE, count)],
        "num_kv_shared_layers": reader.integer("{}.attention.shared_kv_layers", max(0, count - 20), minimum=0),
        "hidden_size_per_layer_input": reader.integer("{}.embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": per_layer_rows,
        "laurel_rank": rank,
        "altup_num_inputs": reader.integer("{}.altup.num_inputs"),
        "altup_active_idx": reader.integer("{}.altup.active_idx", minimum=0),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in file.shapes,
        "activation_sparsity_pattern": _shares(reader, count),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": reader.positive("{}.rope.freq_base_swa", DEFAULT_THETA)},
            FULL: {"rope_type": "default", "rope_theta": config["rope_theta"]},
        },
        "final_logit_softcapping": reader.positive("{}.final_logit_softcapping", 30.0),
    }


def _shares(reader: MetadataReader, count: int) -> list[float] | None:
    """Shares of gates that do not pass, from standard deviations in float32; None: the usual ones."""
    key = "{}.activation_sparsity_scale"
    scales = reader.metadata.get(reader.key(key))
    if scales is None:
        return None
    if (
        not isinstance(scales, np.ndarray)
        or scales.dtype.kind != "f"
        or scales.shape != (count,)
        or np.isnan(scales).any()
    ):
        reader.problems.append(f"{reader.key(key)} must be {count} numbers")
        return None
    return [round(NormalDist().cdf(float(scale)), 6) for scale in scales]


OWN: Mapping[str, Callable[[Described, Config], Config]] = {
    "qwen3next": _qwen3_next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
}
