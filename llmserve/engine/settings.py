"""An operator's settings for an engine: limits of this process, and parameters that only some devices support.

The engine directory determines what the network computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmserve.errors import InvalidArgument, raise_problems
from llmserve.scheduler.settings import SchedulerSettings

LEAST = {
    "max_beam_width": 1, "sink_token_length": 0, "kv_cache_host_memory_bytes": 0, "iter_stats_max_iterations": 0,
    "cuda_graph_cache_size": 0, "kv_cache_disk_size": 1,
}  # fmt: skip
INSTANCE_GPUS = "gpus of instance_group"


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """Parameters of config.pbtxt, with TensorRT-LLM's names. The runtime determines which ones an engine supports;
    others are reported when it is opened, and never silently ignored.

    None, or empty: not given, so the engine's own default applies.
    """

    max_beam_width: int | None = None
    enable_chunked_context: bool | None = None
    max_attention_window_size: tuple[int, ...] = ()  # repeated over the layers
    sink_token_length: int | None = None
    kv_cache_host_memory_bytes: int | None = None
    kv_cache_onboard_blocks: bool | None = None
    iter_stats_max_iterations: int | None = None
    gpu_device_ids: tuple[int, ...] = ()  # of the ranks
    executor_worker_path: str = ""  # program of the ranks, if there are several
    normalize_log_probs: bool | None = None
    multi_block_mode: bool | None = None
    enable_context_fmha_fp32_acc: bool | None = None
    cuda_graph_mode: bool | None = None
    cuda_graph_cache_size: int | None = None
    gpu_weights_percent: float | None = None  # of 1
    kv_cache_dir: str = ""  # llmserve's own: a folder for KV blocks that outlive the process
    kv_cache_disk_size: int | None = None  # llmserve's own: maximum bytes of files there
    draft_engine: str = ""  # llmserve's own: directory of a smaller engine that drafts tokens
    instance_gpus: tuple[int, ...] = ()  # from the config's instance_group: each GPU has the whole engine

    def __post_init__(self) -> None:
        """`InvalidArgument` lists every value that is always invalid."""
        given = self.given()
        found = [
            f"{name} must be at least {least}, got {given[name]}"
            for name, least in LEAST.items()
            if name in given and given[name] < least
        ]
        if any(window < 1 for window in self.max_attention_window_size):
            found.append(f"max_attention_window_size must be positive, got {_text(self.max_attention_window_size)}")
        for name, ids in (("gpu_device_ids", self.gpu_device_ids), (INSTANCE_GPUS, self.instance_gpus)):
            if len(set(ids)) < len(ids) or any(number < 0 for number in ids):
                found.append(f"{name} must be distinct numbers, 0 or more, got {_text(ids)}")
        if not 0 <= (self.gpu_weights_percent or 0) <= 1:
            found.append(f"gpu_weights_percent must be from 0 to 1, got {self.gpu_weights_percent}")
        if self.kv_cache_disk_size is not None and not self.kv_cache_dir:
            found.append("kv_cache_disk_size has no effect without kv_cache_dir; set both")
        raise_problems(InvalidArgument, "settings of the engine", found)

    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ((), "")}

    def without_effect(self, honoured: Collection[str], as_it_is: Mapping[str, Any]) -> list[str]:
        """Settings that an engine does not support, as text. `as_it_is`: values that it has anyway."""
        return [
            f"{_title(name)} = {_text(value)} has no effect on this engine"
            for name, value in self.given().items()
            if name not in honoured and as_it_is.get(name) != value
        ]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits of LoRA adapters in memory."""

    count: int = 64
    num_bytes: int = 0  # 0: no limit


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of this process."""

    threads: int = 0  # 0: every core that this process may use
    kv_cache_fraction: float = 0.9  # of the memory left after the weights, at most
    max_kv_tokens: int = 0  # 0: room for max_batch_size sequences of max_seq_len tokens
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)
    max_adapters: int = AdapterLimits().count  # in memory at the same time
    adapter_memory: int = 0  # maximum bytes of them; 0: no limit
    reserved_bytes: int = 0  # memory that is reported as free but is reserved for other engines

    def __post_init__(self) -> None:
        rules = [
            (self.threads >= 0, f"threads must not be negative (0: all cores), got {self.threads}"),
            (0 < self.kv_cache_fraction <= 1, f"the KV cache fraction must be in (0, 1], got {self.kv_cache_fraction}"),
            (self.max_adapters >= 1, f"max_adapters must be at least 1, got {self.max_adapters}"),
            (self.adapter_memory >= 0, f"adapter_memory must not be negative, got {self.adapter_memory}"),
            (self.max_kv_tokens >= 0, f"the KV cache's tokens must not be negative, got {self.max_kv_tokens}"),
        ]
        raise_problems(InvalidArgument, "engine settings", [text for holds, text in rules if not holds])

    @property
    def adapter_limits(self) -> AdapterLimits:
        return AdapterLimits(self.max_adapters, self.adapter_memory)


def _title(name: str) -> str:
    return INSTANCE_GPUS if name == "instance_gpus" else f"parameter {name}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
