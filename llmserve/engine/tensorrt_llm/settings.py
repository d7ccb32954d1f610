"""What an operator may set for engines on GPUs: parameters of config.pbtxt, under their names there.

Which of them each mode honours is a table; the rest is reported when an engine is opened, and never swallowed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from llmserve.engine.tensorrt_llm.library import Mode
from llmserve.errors import InvalidArgument, raise_problems

ENGINE_ONLY = (
    "gpu_device_ids", "executor_worker_path", "normalize_log_probs", "multi_block_mode", "enable_context_fmha_fp32_acc",
    "cuda_graph_mode", "cuda_graph_cache_size", "gpu_weights_percent",
)  # fmt: skip
LEAST = {
    "max_beam_width": 1, "sink_token_length": 0, "kv_cache_host_memory_bytes": 0, "iter_stats_max_iterations": 0,
    "cuda_graph_cache_size": 0,
}  # fmt: skip
ON_CPU = {"enable_chunked_context": True, "max_beam_width": 1}  # what the cpu engine does anyway


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """None, or empty: not given, the library's own default counts."""

    max_beam_width: int | None = None
    enable_chunked_context: bool | None = None
    max_attention_window_size: tuple[int, ...] = ()  # repeated over the layers
    sink_token_length: int | None = None
    kv_cache_host_memory_bytes: int | None = None
    kv_cache_onboard_blocks: bool | None = None
    iter_stats_max_iterations: int | None = None
    gpu_device_ids: tuple[int, ...] = ()  # of the ranks
    executor_worker_path: str = ""  # program of the ranks, where there are several
    normalize_log_probs: bool | None = None
    multi_block_mode: bool | None = None
    enable_context_fmha_fp32_acc: bool | None = None
    cuda_graph_mode: bool | None = None
    cuda_graph_cache_size: int | None = None
    gpu_weights_percent: float | None = None  # of 1

    def __post_init__(self) -> None:
        """`InvalidArgument` lists every value that no engine takes."""
        given = self.given()
        found = [
            f"{name} must be at least {least}, got {given[name]}"
            for name, least in LEAST.items()
            if name in given and given[name] < least
        ]
        if any(window < 1 for window in self.max_attention_window_size):
            found.append(f"max_attention_window_size must be positive, got {_text(self.max_attention_window_size)}")
        ids = self.gpu_device_ids
        if len(set(ids)) < len(ids) or any(number < 0 for number in ids):
            found.append(f"gpu_device_ids must be different numbers from 0 on, got {_text(ids)}")
        if not 0 <= (self.gpu_weights_percent or 0) <= 1:
            found.append(f"gpu_weights_percent must be from 0 to 1, got {self.gpu_weights_percent}")
        raise_problems(InvalidArgument, "settings of the engine", found)

    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ((), "")}

    def without_effect(self, mode: Mode | None) -> list[str]:
        """In words, what `mode` does not honour. None: the cpu engine."""
        return [
            f"parameter {name} = {_text(value)} has no effect on this engine"
            for name, value in self.given().items()
            if (ON_CPU.get(name) != value if mode is None else mode is Mode.LLM and name in ENGINE_ONLY)
        ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
