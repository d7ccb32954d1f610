"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with q, k and v in one tensor, gate and up in another.

Phi-4-mini rotates only a part of each head. Long-context models have two sets of frequencies (LongRoPE, Ding et al.,
2024). transformers uses the long set for all positions of a sequence that is longer than in the first training. A
token's key would then depend on later tokens, so an engine uses one set, selected by its `max_seq_len`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from llmserve.models.config import ConfigReader, is_number, read_decoder
from llmserve.models.family import FamilySpec, family
from llmserve.models.rope import default_rope, read_rope_values
from llmserve.models.spec import DecoderSpec, HfConfig, Rope

ORIGINAL_POSITIONS = 4096  # transformers' default
LONGROPE = ("longrope", "su", "yarn")  # the last two are older names
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
LONGROPE_KEYS = {"short_factor", "long_factor", "factor", "attention_factor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Spec(FamilySpec):
    original_positions: int  # sequence length of the first training
    long_rope: Rope | None  # of engines for longer sequences; None: one rope for all lengths

    @property
    def usual_seq_len(self) -> int:
        return self.original_positions if self.long_rope else self.max_position_embeddings

    def for_sequences(self, max_seq_len: int) -> Phi3Spec:
        is_long = self.long_rope is not None and max_seq_len > self.original_positions
        return replace(self, rope=self.long_rope) if is_long else self

    def notes(self, max_seq_len: int) -> list[str]:
        if self.long_rope is None:
            return []
        if max_seq_len > self.original_positions:
            return [
                f"max_seq_len {max_seq_len} is more than the {self.original_positions} positions of the first "
                "training: every sequence is computed with the long factors of the rotary embedding, as transformers "
                "computes longer sequences"
            ]
        return [
            f"the network can have sequences of {self.max_position_embeddings} tokens (--max-seq-len), all computed "
            f"with the long factors of its rotary embedding; up to {self.original_positions} it has the short ones"
        ]


def from_hf(config: HfConfig) -> Phi3Spec:
    reader = ConfigReader(config)
    spec = read_decoder(reader, "Phi3ForCausalLM")
    reader.expect("hidden_act", "silu")
    original = reader.integer("original_max_position_embeddings", ORIGINAL_POSITIONS)
    rope, long_rope = read_ropes(reader, spec, original)
    window = reader.integer("sliding_window", 0, minimum=0)
    for key in ("attention_bias", "mlp_bias"):  # keys of other architectures
        reader.expect(key, False)
    reader.finish()
    windows = (window,) * spec.num_layers if window else ()
    return Phi3Spec.extending(
        replace(spec, rope=rope, windows=windows), fused_qkv="qkv_proj", fused_mlp="gate_up_proj",
        original_positions=original, long_rope=long_rope,
    )  # fmt: skip


def read_ropes(
    reader: ConfigReader, spec: DecoderSpec, original: int, *, scales: tuple[str, ...] = ()
) -> tuple[Rope, Rope | None]:
    """The rope, and with LongRoPE the one for longer sequences. Problems go to `reader`.

    `scales`: keys of the factors of cos and sin, one for each rope; empty: they follow from the lengths.
    """
    values = read_rope_values(reader)
    is_long = values["rope_type"] in LONGROPE
    part = values["partial_rotary_factor"]
    rotary_dim = int(spec.head_dim * part) if is_number(part) else 0
    problems = _rope_problems(values, scales, is_long=is_long)
    if not 2 <= rotary_dim <= spec.head_dim or rotary_dim % 2:
        problems.append(f"partial_rotary_factor {part!r} turns no even part of a head of {spec.head_dim}")
    if is_long:
        problems += [
            f"rope parameter {key} must be a list of {rotary_dim // 2} positive numbers, got {values.get(key)!r}"
            for key in ("short_factor", "long_factor")
            if not _are_factors(values.get(key), rotary_dim // 2)
        ]
    reader.problems.extend(problems)
    if problems:
        return Rope(()), None
    plain = default_rope(rotary_dim, float(values["rope_theta"]))
    if not is_long:
        return plain, None
    usual = _attention_factor(values, spec.max_position_embeddings, original)
    by_length = tuple(float(values[key]) for key in scales) or (usual, usual)
    short, long = (
        Rope(tuple(f / factor for f, factor in zip(plain.inv_freq, values[key], strict=True)), scale)
        for key, scale in zip(("short_factor", "long_factor"), by_length, strict=True)
    )
    return short, long if spec.max_position_embeddings > original else None


def _rope_problems(values: dict[str, Any], scales: tuple[str, ...], *, is_long: bool) -> list[str]:
    known = ROPE_KEYS | ({*LONGROPE_KEYS, *scales} if is_long else set())
    problems = [f"rope parameter {key!r} is unknown" for key in sorted(values.keys() - known)]
    if not is_long and values["rope_type"] != "default":
        problems.append(f"rope type {values['rope_type']!r} is not supported; supported: default, longrope")
    positive = [key for key in ("rope_theta", "factor", "attention_factor", *scales) if key in values]
    positive += [key for key in scales if is_long and key not in values]
    problems += [
        f"{key} must be a positive number, got {values.get(key)!r}"
        for key in positive
        if not _is_factor(values.get(key))
    ]
    return problems


def _is_factor(value: Any) -> bool:
    return is_number(value) and bool(value > 0)


def _are_factors(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_factor, values))


def _attention_factor(values: dict[str, Any], positions: int, original: int) -> float:
    """The factor of cos and sin, which grows with the stretch of positions."""
    if "attention_factor" in values:
        return float(values["attention_factor"])
    stretch = float(values.get("factor", positions / original))
    return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0


ARCHITECTURE = family("Phi3ForCausalLM", "phi3", from_hf)
