"""An engine directory and the limits of this process -> a running `Engine`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.engine.artifact import EngineDirectory
from llmserve.engine.base import Engine, EngineInfo
from llmserve.engine.cpu.runner import CpuRunner, kv_bytes_per_block, read_header
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.memory import available_memory_bytes
from llmserve.engine.tensorrt_llm.open import open_tensorrt_llm
from llmserve.engine.tensorrt_llm.settings import GpuSettings
from llmserve.errors import InvalidArgument, ResourceExhausted, Unsupported, raise_problems
from llmserve.scheduler.settings import SchedulerSettings

logger = logging.getLogger(__name__)

CPU_TARGET = "cpu"
GPU_TARGET = "tensorrt_llm"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of this process. What the network computes is fixed by the engine directory."""

    threads: int = 0  # 0: every core that this process may use
    kv_cache_fraction: float = 0.9  # of the memory left after the weights, as an upper limit
    max_kv_tokens: int = 0  # 0: room for max_batch_size sequences of max_seq_len tokens
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    gpu: GpuSettings = field(default_factory=GpuSettings)

    def __post_init__(self) -> None:
        rules = [
            (self.threads >= 0, f"threads must not be negative (0: all cores), got {self.threads}"),
            (0 < self.kv_cache_fraction <= 1, f"the KV cache fraction must be in (0, 1], got {self.kv_cache_fraction}"),
            (self.max_kv_tokens >= 0, f"the KV cache's tokens must not be negative, got {self.max_kv_tokens}"),
        ]
        raise_problems(InvalidArgument, "engine settings", [text for holds, text in rules if not holds])


def open_engine(path: Path, settings: EngineSettings | None = None) -> Engine:
    """The engine that the manifest's target names, ready for requests.

    Raises NotFound or EngineFileError for a directory that is no usable engine here, ResourceExhausted when the KV pool
    does not fit this machine. A setting that the engine cannot honour is logged as a warning.
    """
    settings = settings or EngineSettings()
    directory = EngineDirectory.open(path)
    if directory.manifest.target == GPU_TARGET:
        if settings.threads:
            logger.warning("num_threads = %d has no effect on this engine", settings.threads)
        return open_tensorrt_llm(
            directory,
            kv_cache_fraction=settings.kv_cache_fraction,
            max_kv_tokens=settings.max_kv_tokens,
            scheduler=settings.scheduler,
            gpu=settings.gpu,
        )
    if directory.manifest.target != CPU_TARGET:
        raise Unsupported(
            f"{path} was built for target {directory.manifest.target!r}; this version executes {CPU_TARGET!r} and "
            f"{GPU_TARGET!r} engines; run: llmserve build ... --target {CPU_TARGET}"
        )
    return _open_cpu(directory, settings)


def _open_cpu(directory: EngineDirectory, settings: EngineSettings) -> InflightEngine:
    """Map the engine file, allocate the KV pool and start the step loop."""
    for text in settings.gpu.without_effect(None):
        logger.warning("%s", text)
    info = directory.info()
    num_blocks = num_kv_blocks(directory.engine_file, info, settings)
    runner = CpuRunner.open(directory.engine_file, num_blocks=num_blocks, threads=settings.threads)
    return InflightEngine(runner, info, settings.scheduler)


def num_kv_blocks(engine_file: Path, info: EngineInfo, settings: EngineSettings) -> int:
    """Blocks of the KV pool: what was asked for or what the batch can use, or less where memory allows less.

    Raises ResourceExhausted when more was asked for than there is memory at all, or when memory cuts the pool so far
    that a sequence of `max_seq_len` tokens has no room. A pool may be as small as that only when asked for.
    """
    header = read_header(engine_file)
    block_size, block_bytes = header.block_size, kv_bytes_per_block(header)
    num_wanted = -(-(settings.max_kv_tokens or info.max_batch_size * info.max_seq_len) // block_size)
    free_bytes = max(0, available_memory_bytes() - engine_file.stat().st_size - header.activation_bytes)
    num_allowed = int(settings.kv_cache_fraction * free_bytes) // block_bytes
    wanted = f"a KV cache of {num_wanted * block_size} tokens needs {_mib(num_wanted * block_bytes)}"
    left = f"{_mib(free_bytes)} of memory are left for it"
    if settings.max_kv_tokens and num_wanted * block_bytes > free_bytes:
        raise ResourceExhausted(f"{wanted}, but {left}; lower max_tokens_in_paged_kv_cache (--max-kv-tokens)")
    if num_wanted <= num_allowed:
        return num_wanted
    allowed = f"{left}, and kv_cache_free_gpu_mem_fraction (--kv-cache-fraction) is {settings.kv_cache_fraction}"
    if num_allowed * block_size < info.max_seq_len:
        raise ResourceExhausted(
            f"a KV cache with room for one sequence of {info.max_seq_len} tokens needs "
            f"{_mib(-(-info.max_seq_len // block_size) * block_bytes)}, but {allowed}; free some memory, or build with "
            f"a smaller max_seq_len"
        )
    logger.warning("%s, but %s: it gets %d tokens", wanted, allowed, num_allowed * block_size)
    return num_allowed


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
