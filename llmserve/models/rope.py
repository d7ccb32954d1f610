"""Rotary position embedding: inverse frequencies from a config, in the old and the new style.

Old: `rope_theta` and `rope_scaling`. New (transformers 5): everything in `rope_parameters`. If a config has both,
`rope_scaling` wins, as in transformers, because users add it. `VARIANTS` lists the supported variants, which follow
transformers' rules. longrope supports one set of factors only; `phi3.py` has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from llmserve.models.config import MAX_SIZE, ConfigReader, is_number
from llmserve.models.spec import HfConfig, Rope
from llmserve.models.windows import FULL, SLIDING

DEFAULT_THETA = 10000.0
# tensors in old checkpoints; their values follow from the config
STORED_FREQUENCIES = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
UNREAD = frozenset(
    (
        "attn_factor",  # YaRN in vLLM: multiplies cos and sin; transformers only reads attention_factor
        "finetuned",  # whether the network was trained with its scaling (NousResearch's YaRN models)
        "mrope_section",  # rotation by positions in images; in a text, they are all equal
        "mrope_interleaved",
    )
)
Frequencies: TypeAlias = tuple[float, ...]


def default_rope(rotary_dim: int, theta: float) -> Rope:
    """`rotary_dim`: number of rotated elements of a head."""
    return Rope(tuple(theta ** (-i / rotary_dim) for i in range(0, rotary_dim, 2)))


def read_rope(reader: ConfigReader, head_dim: int, *, partial: bool = False) -> Rope:
    """The rotary embedding of the config. Problems go to `reader`.

    `partial`: it may rotate only a part of each head, `partial_rotary_factor`.
    """
    values = read_rope_values(reader)
    part = values["partial_rotary_factor"]
    rotary_dim = int(head_dim * part) if partial and is_number(part) and 0 < part <= 1 else head_dim
    if rotary_dim < head_dim:
        values["partial_rotary_factor"] = 1.0
    problems = _rope_problems(values, rotary_dim)
    if problems:
        reader.problems.extend(problems)
        return Rope(())
    plain = default_rope(rotary_dim, float(values["rope_theta"]))
    return VARIANTS[values["rope_type"]].apply(plain.inv_freq, values)


def read_ropes(reader: ConfigReader, head_dim: int, theta: Mapping[str, tuple[str, float]]) -> tuple[Rope, Rope]:
    """Embeddings of layers with full attention, and with a window. `theta`: old key and default of each type.

    New style: `rope_parameters` has both by name. Old: `rope_scaling` is for full attention; it also wins over the new.
    """
    nested = reader.get("rope_parameters")
    if nested is not None and not (isinstance(nested, Mapping) and nested.keys() <= theta.keys()):
        reader.problems.append(f"rope_parameters must be an object with {FULL} and {SLIDING}, got {nested!r}")
        nested = {}
    found = []
    for kind in (FULL, SLIDING):
        key, default = theta[kind]
        added = reader.get("rope_scaling") if kind == FULL else None
        parts = ({"rope_theta": reader.get(key, default)}, (nested or {}).get(kind) or {}, added or {})
        wrong = [part for part in parts if not isinstance(part, Mapping)]
        given = wrong[0] if wrong else {name: value for part in parts for name, value in part.items()}
        inner = ConfigReader({"rope_scaling": given, "max_position_embeddings": reader.get("max_position_embeddings")})
        found.append(read_rope(inner, head_dim))
        reader.problems += [f"{kind}: {problem}" for problem in inner.problems]
    return found[0], found[1]


def scaled_positions(reader: ConfigReader) -> int:
    """The longest sequence that the model is made for: `max_position_embeddings`, extended by the scaling."""
    positions = reader.integer("max_position_embeddings")
    values = read_rope_values(ConfigReader(reader.config))  # a separate reader: `read_rope` reports the problems
    if _scaling_problems(values):
        return positions
    return max(1, int(min(VARIANTS[values["rope_type"]].positions(positions, values), MAX_SIZE)))


def rope_values(config: HfConfig) -> dict[str, Any]:
    """Theta, type and the type's own numbers as one flat mapping, from either style of config."""
    return read_rope_values(ConfigReader(config))


def plain_position_limit(config: HfConfig) -> int | None:
    """The longest sequence of a config with an unknown architecture; None if it has no valid limit.

    `max_position_embeddings` wins over `model_max_length`. An unknown scaling does not change the limit.
    """
    reader = ConfigReader(config)
    if reader.get("max_position_embeddings") is not None:
        limit = scaled_positions(reader)
    else:
        limit = reader.integer("model_max_length")
    return None if reader.problems else limit


def rope_key(config: HfConfig) -> str:
    """The config's key for a rotary embedding that all layers share."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def read_rope_values(reader: ConfigReader) -> dict[str, Any]:
    """As `rope_values`, but problems go to `reader`. Null values are left out."""
    key = rope_key(reader.config)
    given = reader.get(key) or {}
    if not isinstance(given, Mapping):
        reader.problems.append(f"rope_parameters or rope_scaling must be an object, got {given!r}")
        given = {}
    values = {key: value for key, value in given.items() if value is not None}
    values.setdefault("rope_type", values.get("type", "default"))
    values.setdefault("rope_theta", reader.get("rope_theta", DEFAULT_THETA))
    values.setdefault("partial_rotary_factor", reader.get("partial_rotary_factor", 1.0))
    replaced = reader.get("rope_parameters") if key == "rope_scaling" else None
    if isinstance(replaced, Mapping):  # transformers drops values that only rope_parameters has
        reader.problems += [
            f"rope_scaling replaces rope_parameters and has no {name}: give it there, too ({name}: {replaced[name]!r})"
            for name in ("rope_theta", "partial_rotary_factor")
            if name not in given and replaced.get(name, values[name]) != values[name]
        ]
    # some configs have the trained length outside the rope parameters, too; that one wins, as in transformers
    trained = reader.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    values["original_max_position_embeddings"] = trained or reader.get("max_position_embeddings", 0)
    return values


def _rope_problems(values: Mapping[str, Any], rotary_dim: int) -> list[str]:
    problems = _scaling_problems(values)
    if rotary_dim % 2 or not rotary_dim:
        problems.append(f"a rotary embedding needs an even head size, got {rotary_dim}")
    if not problems and values["rope_type"] == "longrope":
        problems += _factor_problems(values, rotary_dim // 2)
    return problems


def _factor_problems(values: Mapping[str, Any], count: int) -> list[str]:
    long, short = values.get("long_factor"), values.get("short_factor")
    if not (isinstance(long, list) and len(long) == count and all(map(_is_positive, long))):
        return [f"rope parameter long_factor must be a list of {count} positive numbers, got {long!r}"]
    if short != long:
        return ["rope type 'longrope' with factors that change with the length of a sequence is not supported here"]
    return []


def _scaling_problems(values: Mapping[str, Any]) -> list[str]:
    kind = values["rope_type"]
    variant = VARIANTS.get(kind) if isinstance(kind, str) else None
    if variant is None:
        return [f"rope type {kind!r} is not supported; supported: {', '.join(VARIANTS)}"]
    known = UNREAD | {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    known |= {key for each in VARIANTS.values() for key in (*each.required, *each.optional, *each.flags, *each.lists)}
    problems = [f"rope parameter {key!r} is unknown" for key in sorted(values.keys() - known)]
    if values["partial_rotary_factor"] != 1.0:
        problems.append(f"partial_rotary_factor {values['partial_rotary_factor']!r} is not supported; supported: 1.0")
    wanted = ("rope_theta", *variant.required, *(key for key in variant.optional if key in values))
    problems += [
        f"rope type {kind!r} needs a positive {key}, got {values.get(key)!r}"
        for key in wanted
        if not _is_positive(values.get(key))
    ]
    problems += [
        f"rope parameter {key} must be true or false, got {values[key]!r}"
        for key in variant.flags
        if not isinstance(values.get(key, True), bool)
    ]
    return problems


def _is_positive(value: Any) -> bool:
    return is_number(value) and bool(value > 0)


def _default(inv_freq: Frequencies, values: Mapping[str, Any]) -> Rope:
    return Rope(inv_freq)


def _ntk_alpha(inv_freq: Frequencies, values: Mapping[str, Any]) -> Rope:
    """Theta times alpha ** (d / (d - 2)), where d elements are rotated (Hunyuan's rule)."""
    others = max(1, 2 * len(inv_freq) - 2)
    return Rope(tuple(f * values["alpha"] ** (-2 * i / others) for i, f in enumerate(inv_freq)))


def _linear(inv_freq: Frequencies, values: Mapping[str, Any]) -> Rope:
    return Rope(tuple(f / values["factor"] for f in inv_freq))


def _llama3(inv_freq: Frequencies, values: Mapping[str, Any]) -> Rope:
    """Short wavelengths stay, long ones are stretched by `factor`, and those in between are interpolated."""
    low, high = values["low_freq_factor"], values["high_freq_factor"]

    def scaled(frequency: float) -> float:
        turns = values["original_max_position_embeddings"] * frequency / (2 * math.pi)  # within the trained length
        if turns < low:
            return frequency / float(values["factor"])
        if turns > high:
            return frequency
        keep = (turns - low) / (high - low) if high != low else 1.0
        return (1 - keep) * frequency / float(values["factor"]) + keep * frequency

    return Rope(tuple(scaled(f) for f in inv_freq))


def _longrope(inv_freq: Frequencies, values: Mapping[str, Any]) -> Rope:
    """Each frequency divided by its own factor (LongRoPE, Ding et al., 2024)."""
    factors = values["long_factor"]
    scaled = tuple(f / factor for f, factor in zip(inv_freq, factors, strict=True))
    return Rope(scaled, scale=float(values["attention_factor"]))


def _yarn(inv_freq: Frequencies, values: Mapping[str, Any]) -> Rope:
    """YaRN (Peng et al., 2023): a linear ramp over the dimensions between stretched and original frequencies."""
    factor, half = float(values["factor"]), len(inv_freq)
    head_dim, log_theta = 2 * half, math.log(values["rope_theta"])

    def dimension(turns: float) -> float:
        """The dimension that makes `turns` full rotations within the trained length."""
        trained = values["original_max_position_embeddings"]
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * log_theta)

    low, high = dimension(values.get("beta_fast", 32)), dimension(values.get("beta_slow", 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001

    def scaled(i: int) -> float:
        stretch = min(max((i - low) / span, 0.0), 1.0)
        return inv_freq[i] * (stretch / factor + 1 - stretch)

    return Rope(tuple(scaled(i) for i in range(half)), scale=_yarn_attention_factor(factor, values))


def _yarn_attention_factor(factor: float, values: Mapping[str, Any]) -> float:
    if "attention_factor" in values:
        return float(values["attention_factor"])
    if "mscale" in values and "mscale_all_dim" in values:
        return yarn_magnitude(factor, values["mscale"]) / yarn_magnitude(factor, values["mscale_all_dim"])
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _as_configured(positions: int, values: Mapping[str, Any]) -> float:
    return positions


def _linear_positions(positions: int, values: Mapping[str, Any]) -> float:
    return positions * float(values["factor"])


def _yarn_positions(positions: int, values: Mapping[str, Any]) -> float:
    """Some configs already have the stretched length, others the trained one."""
    return max(positions, float(values["original_max_position_embeddings"]) * float(values["factor"]))


@dataclass(frozen=True, slots=True)
class Variant:
    apply: Callable[[Frequencies, Mapping[str, Any]], Rope]
    required: tuple[str, ...] = ()  # positive numbers
    optional: tuple[str, ...] = ()  # positive numbers, if present
    flags: tuple[str, ...] = ()  # true or false, if present
    lists: tuple[str, ...] = ()  # a positive number for each frequency
    positions: Callable[[int, Mapping[str, Any]], float] = _as_configured  # the limit, from max_position_embeddings


VARIANTS: Mapping[str, Variant] = {
    "default": Variant(_default),
    "dynamic": Variant(_default, ("factor",)),  # no effect up to `max_position_embeddings`
    "ntk_alpha": Variant(_ntk_alpha, ("alpha",)),
    "linear": Variant(_linear, ("factor",), positions=_linear_positions),
    "llama3": Variant(_llama3, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": Variant(
        _yarn,
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        ("truncate",),
        positions=_yarn_positions,
    ),
    "longrope": Variant(_longrope, ("attention_factor",), lists=("long_factor", "short_factor")),
}
