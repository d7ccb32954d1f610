"""How large the KV pool of an engine of ours becomes."""

from __future__ import annotations

import logging

from llmserve.engine.base import EngineInfo
from llmserve.engine.settings import EngineSettings
from llmserve.errors import ResourceExhausted

logger = logging.getLogger(__name__)


def num_kv_blocks(
    info: EngineInfo, settings: EngineSettings, *, block_size: int, block_bytes: int, free_bytes: int
) -> int:
    """Blocks of the KV pool: what was asked for or what the batch can use, or less where memory allows less.

    block_size: tokens; free_bytes: of the device, besides all else that the engine takes.
    Raises ResourceExhausted when more was asked for than there is memory at all, or when memory cuts the pool so far
    that a sequence of `max_seq_len` tokens has no room. A pool may be as small as that only when asked for.
    """
    num_wanted = -(-(settings.max_kv_tokens or info.max_batch_size * info.max_seq_len) // block_size)
    free_bytes = max(0, free_bytes)
    num_allowed = int(settings.kv_cache_fraction * free_bytes) // block_bytes
    wanted = f"a KV cache of {num_wanted * block_size} tokens needs {_size(num_wanted * block_bytes)}"
    beside = f" ({_size(settings.reserved_bytes)} belong to the engine beside it)" if settings.reserved_bytes else ""
    left = f"{_size(free_bytes)} of memory are left for it{beside}"
    if settings.max_kv_tokens and num_wanted * block_bytes > free_bytes:
        raise ResourceExhausted(f"{wanted}, but {left}; lower max_tokens_in_paged_kv_cache (--max-kv-tokens)")
    if num_wanted <= num_allowed:
        return num_wanted
    fraction = settings.kv_cache_fraction
    allowed = (
        f"it may have {_size(fraction * free_bytes)}: {left}, and kv_cache_free_gpu_mem_fraction "
        f"(--kv-cache-fraction) is {fraction:g}"
    )
    if num_allowed * block_size < info.max_seq_len:
        raise ResourceExhausted(
            f"a KV cache with room for one sequence of {info.max_seq_len} tokens needs "
            f"{_size(-(-info.max_seq_len // block_size) * block_bytes)}, and {allowed}; raise the fraction, free "
            f"some memory, or build with a smaller max_seq_len"
        )
    if settings.max_kv_tokens:
        logger.warning("%s, and %s: it gets %d tokens", wanted, allowed, num_allowed * block_size)
    else:  # nobody asked for room for the largest batch
        got = f"{num_allowed * block_size} tokens ({_size(num_allowed * block_bytes)})"
        logger.info("the KV cache has %s: %s, and --kv-cache-fraction is %g", got, left, fraction)
    return num_allowed


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
