"""Falcon-H1: attention and Mamba in parallel in every layer, with a multiplier for each of their parts.

Multipliers become part of the weights: rows of matrices, and their biases, are multiplied when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmserve.models import bamba, family, mamba
from llmserve.models.config import ConfigReader, is_number
from llmserve.models.family import FamilySpec, read_family
from llmserve.models.mamba import GateNorm, Mamba, read_mamba
from llmserve.models.spec import Architecture, HfConfig, Param

DEFAULTS = mamba.DEFAULTS | {  # transformers' defaults
    "num_key_value_heads": 8, "mamba_rms_norm": False, "mamba_norm_before_gate": True,
}  # fmt: skip
DEFAULT_INNER = 1024
PARTS = ("gate", "x", "b", "c", "steps")  # of the output of Mamba's first matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconSpec(FamilySpec):
    attention_in: float
    attention_out: float
    key: float
    mamba_in: float
    mamba_out: float
    mamba_parts: tuple[float, ...]  # one for each of PARTS
    gate: float  # of the MLP
    down: float


def from_hf(config: HfConfig) -> FalconSpec:
    given = {key: value for key, value in config.items() if value is not None}
    reader = ConfigReader(DEFAULTS | given)
    spec = read_family(reader, "FalconH1ForCausalLM")
    bias, multiplier = reader.flag("attention_bias"), _multipliers(reader)
    found = replace(
        spec,
        norms=bamba.NORMS,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        mlp_module="feed_forward",
        mixer=_read_mixer(reader, config, spec),
        has_both=True,
        embed_scale=reader.positive("embedding_multiplier", 1.0),
        logit_scale=reader.positive("lm_head_multiplier", 1.0),
    )
    reader.finish()
    return FalconSpec.extending(found, **multiplier)


def _read_mixer(reader: ConfigReader, config: HfConfig, spec: FamilySpec) -> Mamba:
    inner = reader.integer("mamba_d_ssm", DEFAULT_INNER)
    if config.get("mamba_d_ssm", DEFAULT_INNER) is None:
        inner = reader.integer("mamba_expand") * spec.hidden_size
    norm = GateNorm.NONE
    before_gate = reader.flag("mamba_norm_before_gate")
    if reader.flag("mamba_rms_norm"):
        norm = GateNorm.PLAIN if before_gate else GateNorm.GATED
    found = read_mamba(reader, spec.norm_eps, inner=inner)
    return replace(found, norm=norm, output_bias=reader.flag("projectors_bias"))


def _multipliers(reader: ConfigReader) -> dict[str, Any]:
    lists = {}
    for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", len(PARTS))):
        given = reader.get(key, [1.0] * count)
        if not (isinstance(given, list) and len(given) == count and all(is_number(x) and x > 0 for x in given)):
            reader.problems.append(f"{key} must be a list of {count} positive numbers, got {given!r}")
            given = [1.0] * count
        lists[key] = tuple(map(float, given))
    gate, down = lists["mlp_multipliers"]
    names = {
        "attention_in": "attention_in_multiplier", "attention_out": "attention_out_multiplier", "key": "key_multiplier",
        "mamba_in": "ssm_in_multiplier", "mamba_out": "ssm_out_multiplier",
    }  # fmt: skip
    single = {field: reader.positive(key, 1.0) for field, key in names.items()}
    return single | {"mamba_parts": lists["ssm_multipliers"], "gate": gate, "down": down}


def params(spec: FalconSpec) -> list[Param]:
    factors = _factors(spec)
    return [replace(param, factors=factors.get(param.name.split(".", 2)[-1], ())) for param in bamba.params(spec)]


def _factors(spec: FalconSpec) -> Mapping[str, tuple[tuple[int, float], ...]]:
    """(Number of rows, factor) of the parameters of a layer. Factors of the input do not apply to biases."""
    mixer, a, hidden, inner = spec.mixer, spec.attention_in, spec.hidden_size, spec.intermediate_size
    assert isinstance(mixer, Mamba)
    of_group = mixer.num_groups * mixer.state_size
    heights = (mixer.inner, mixer.inner, of_group, of_group, mixer.num_heads)
    parts = tuple(zip(heights, spec.mamba_parts, strict=True))
    both = {
        "attn.output": ((hidden, spec.attention_out),),
        "mamba.output": ((hidden, spec.mamba_out),),
        "mlp.gate_up": ((inner, spec.gate), (inner, 1.0)),
        "mlp.down": ((hidden, spec.down),),
    }
    q, kv = spec.q_width, spec.kv_width
    return {
        "attn.qkv": ((q, a), (kv, a * spec.key), (kv, a)),
        "attn.qkv.bias": ((q, 1.0), (kv, spec.key), (kv, 1.0)),
        "mamba.input": tuple((height, spec.mamba_in * factor) for height, factor in parts),
        "mamba.input.bias": parts,
        **both,
        **{f"{name}.bias": factors for name, factors in both.items()},
    }


ARCHITECTURE: Architecture[FalconSpec] = replace(
    family.family("FalconH1ForCausalLM", "falcon_h1", from_hf), params=params
)
