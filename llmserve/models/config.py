"""Reads a Hugging Face config.json. Every value is checked, and one error lists all problems."""

from __future__ import annotations

import sys
from typing import Any

from llmserve.errors import CheckpointError, raise_problems
from llmserve.models.spec import DecoderSpec, HfConfig

MAX_SIZE = 2**31 - 1
MAX_COUNT = 10_000  # of layers, heads, head size: so a mistyped config cannot create huge lists


class ConfigReader:
    """Typed access to a config. A bad value is recorded and replaced by a harmless one; `finish` raises."""

    def __init__(self, config: HfConfig) -> None:
        self.config = config
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; `default` if the key is missing or null."""
        value = self.config.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        self._wrong(key, f"an integer from {minimum} to {maximum}", value)
        return minimum

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if is_number(value) and value > 0:
            return float(value)
        self._wrong(key, "a positive number", value)
        return 1.0

    def optional_positive(self, key: str, default: float = 0.0) -> float:
        """`default` if the key is missing; 0 if it is null."""
        value = self.config.get(key, default)
        return self.positive(key) if key in self.config and value is not None else value or 0.0

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        self._wrong(key, "true or false", value)
        return default

    def expect(self, key: str, *allowed: Any) -> None:
        """Reject a value outside `allowed`. A missing or null key is accepted."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            self.problems.append(f"{key} {value!r} is not supported; supported: {', '.join(map(repr, allowed))}")

    def finish(self) -> None:
        """Raise one CheckpointError that lists every problem found."""
        raise_problems(CheckpointError, "config.json", self.problems)

    def _wrong(self, key: str, wanted: str, value: Any) -> None:
        found = "it is missing" if value is None else f"got {value!r}"
        self.problems.append(f"{key} must be {wanted}, {found}")


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number in the range of a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_decoder(
    reader: ConfigReader,
    architecture: str,
    *,
    max_positions: int | None = None,
    eps_key: str = "rms_norm_eps",
    bidirectional: bool = False,
) -> DecoderSpec:
    """The sizes that every decoder has. The architecture file adds rotary embedding, windows, biases and activation.

    `bidirectional`: tokens may attend to later ones.
    """
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads", maximum=MAX_COUNT)
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        reader.problems.append(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if reader.get("head_dim") is None and hidden_size % num_heads:
        reader.problems.append(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    _refuse_quantized(reader)
    if not bidirectional:
        reader.expect("is_causal", True)
    return DecoderSpec(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers", maximum=MAX_COUNT),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=reader.integer("head_dim", max(1, hidden_size // num_heads), maximum=MAX_COUNT),
        max_position_embeddings=max_positions or reader.integer("max_position_embeddings"),
        norm_eps=reader.positive(eps_key),
        tied_embeddings=reader.flag("tie_word_embeddings"),
    )


def _refuse_quantized(reader: ConfigReader) -> None:
    quantization = reader.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        reader.problems.append(
            f"the checkpoint is already quantized (quantization_config: {method}); use the original checkpoint "
            "and quantize at build time"
        )
    if reader.get("per_layer_config"):
        reader.problems.append("per_layer_config is not supported: all layers must have the same shape")
