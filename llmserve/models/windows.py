"""Sliding windows per layer, from `layer_types`, or from Qwen's `use_sliding_window` and `max_window_layers`."""

from __future__ import annotations

from llmserve.models.config import ConfigReader

DEFAULT_WINDOW = 4096  # transformers' default
DEFAULT_MAX_WINDOW_LAYERS = 28
FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """The window of each layer (0: full attention); empty if every layer is full."""
    slides = reader.flag("use_sliding_window")
    window = reader.integer("sliding_window", DEFAULT_WINDOW) if slides and has_window(reader) else 0
    types = reader.get("layer_types")
    if types is None:
        first_full = reader.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        types = [SLIDING if window and i >= first_full else FULL for i in range(num_layers)]
    return windows_by_type(reader, types, num_layers, window)


def windows_by_type(reader: ConfigReader, types: object, num_layers: int, window: int) -> tuple[int, ...]:
    """`window` in each layer with one (0: full attention); empty if every layer is full."""
    reader.problems.extend(_layer_type_problems(types, num_layers, window))
    windows = tuple(window if kind == SLIDING else 0 for kind in types) if isinstance(types, list) else ()
    return windows if any(windows) else ()


def types_by_pattern(num_layers: int, every: int) -> list[str]:
    """Types of layers: every `every`th has full attention, the others have a window."""
    return [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]


def has_window(reader: ConfigReader) -> bool:
    """False if the config has `"sliding_window": null`; a missing key means the default window."""
    return "sliding_window" not in reader.config or reader.config["sliding_window"] is not None


def _layer_type_problems(types: object, num_layers: int, window: int) -> list[str]:
    if not isinstance(types, list) or len(types) != num_layers:
        return [f"layer_types must be a list of num_hidden_layers ({num_layers}) names, got {types!r}"]
    unknown = sorted({repr(kind) for kind in types if kind not in (FULL, SLIDING)})
    problems = [f"layer type {name} is not supported; supported: {FULL!r}, {SLIDING!r}" for name in unknown]
    if SLIDING in types and not window:
        problems.append("layer_types has sliding_attention, but use_sliding_window is off or sliding_window is null")
    return problems
