"""An engine directory and the limits of this process -> a running `Engine`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmserve.engine.artifact import EngineDirectory
from llmserve.engine.base import Engine, EngineInfo
from llmserve.engine.cpu.runner import CpuRunner, kv_bytes_per_block, read_header
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.memory import available_memory_bytes
from llmserve.errors import InvalidArgument, ResourceExhausted, Unsupported, raise_problems
from llmserve.scheduler.settings import SchedulerSettings

CPU_TARGET = "cpu"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of this process. What the network computes is fixed by the engine directory."""

    threads: int = 0  # 0: every core that this process may use
    kv_cache_fraction: float = 0.9  # of the memory left after the weights, as an upper limit
    max_kv_tokens: int = 0  # 0: room for max_batch_size sequences of max_seq_len tokens
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)

    def __post_init__(self) -> None:
        rules = [
            (self.threads >= 0, f"threads must not be negative (0: all cores), got {self.threads}"),
            (0 < self.kv_cache_fraction <= 1, f"the KV cache fraction must be in (0, 1], got {self.kv_cache_fraction}"),
            (self.max_kv_tokens >= 0, f"the KV cache's tokens must not be negative, got {self.max_kv_tokens}"),
        ]
        raise_problems(InvalidArgument, "engine settings", [text for holds, text in rules if not holds])


def open_engine(path: Path, settings: EngineSettings | None = None) -> Engine:
    """Map the engine file, allocate the KV pool and start the step loop.

    Raises NotFound or EngineFileError for a directory that is no usable engine, ResourceExhausted when the KV pool
    does not fit this machine.
    """
    settings = settings or EngineSettings()
    directory = EngineDirectory.open(path)
    info = directory.info()
    if info.target != CPU_TARGET:
        raise Unsupported(f"{path} was built for target {info.target!r}; this version executes {CPU_TARGET!r} engines")
    num_blocks = num_kv_blocks(directory.engine_file, info, settings)
    runner = CpuRunner.open(directory.engine_file, num_blocks=num_blocks, threads=settings.threads)
    return InflightEngine(runner, info, settings.scheduler)


def num_kv_blocks(engine_file: Path, info: EngineInfo, settings: EngineSettings) -> int:
    """Blocks of the KV pool: what was asked for, or what the batch can use, or what memory allows."""
    header = read_header(engine_file)
    wanted_tokens = settings.max_kv_tokens or info.max_batch_size * info.max_seq_len
    num_wanted = -(-wanted_tokens // header.block_size)
    free_bytes = available_memory_bytes() - engine_file.stat().st_size
    num_affordable = int(settings.kv_cache_fraction * free_bytes) // kv_bytes_per_block(header)
    if settings.max_kv_tokens and num_affordable < num_wanted:
        raise ResourceExhausted(
            f"a KV cache of {settings.max_kv_tokens} tokens needs "
            f"{num_wanted * kv_bytes_per_block(header) / 2**20:,.0f} MiB, but {free_bytes / 2**20:,.0f} MiB of memory "
            f"are left for it; lower max_tokens_in_paged_kv_cache (--max-kv-tokens) or build with a smaller max_seq_len"
        )
    if num_affordable < 1:
        raise ResourceExhausted(
            f"no memory is left for the KV cache: {free_bytes / 2**20:,.0f} MiB are available after the weights; "
            f"free some memory or build a smaller engine"
        )
    return min(num_wanted, num_affordable)
