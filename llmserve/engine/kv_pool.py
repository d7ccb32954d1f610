"""Determines the size of the KV pool of llmserve's own engines."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import NamedTuple

from llmserve.engine.base import EngineInfo
from llmserve.engine.settings import EngineSettings
from llmserve.errors import ResourceExhausted
from llmserve.scheduler.settings import NO_WINDOWS, WindowedLayers

logger = logging.getLogger(__name__)


class PoolShape(NamedTuple):
    """Tokens per block, and the layers whose blocks have their own tables."""

    block_size: int
    layers: WindowedLayers

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) + self.layers.num_blocks_for(num_tokens, self.block_size)


def num_kv_blocks(
    info: EngineInfo, settings: EngineSettings, *, block_size: int, block_bytes: int, free_bytes: int,
    layers: WindowedLayers = NO_WINDOWS,
) -> int:  # fmt: skip
    """Blocks of the KV pool: the requested number or what the batch can use, or less if memory is insufficient.

    block_size: tokens; free_bytes: memory of the device that the rest of the engine does not need; layers: those whose
    blocks have their own tables. If there are any, the requested number of tokens fits in sequences of any length.
    Raises ResourceExhausted if the requested pool exceeds the memory, or if memory reduces the pool so far that a
    sequence of `max_seq_len` tokens does not fit. Only a requested pool may be that small.
    """
    num_longest = -(-info.max_seq_len // block_size) + layers.num_blocks_for(info.max_seq_len, block_size)
    num_wanted = _num_wanted(info, settings, block_size, layers)
    free_bytes = max(0, free_bytes)
    num_allowed = int(settings.kv_cache_fraction * free_bytes) // block_bytes

    def tokens(num_blocks: int) -> int:
        """Tokens of sequences of any length, or of the longest ones."""
        if settings.max_kv_tokens or not layers.num_tables:
            return num_blocks // (1 + layers.num_tables) * block_size
        return num_blocks * info.max_seq_len // num_longest

    wanted = f"a KV cache of {tokens(num_wanted)} tokens needs {_size(num_wanted * block_bytes)}"
    beside = f" ({_size(settings.reserved_bytes)} are reserved for the other engine)" if settings.reserved_bytes else ""
    left = f"{_size(free_bytes)} of memory are left{beside}"
    if settings.max_kv_tokens and num_wanted * block_bytes > free_bytes:
        raise ResourceExhausted(f"{wanted}, but {left}; lower max_tokens_in_paged_kv_cache (--max-kv-tokens)")
    if num_wanted <= num_allowed:
        return num_wanted
    fraction = settings.kv_cache_fraction
    allowed = (
        f"it may have {_size(fraction * free_bytes)}: {left}, and kv_cache_free_gpu_mem_fraction "
        f"(--kv-cache-fraction) is {fraction:g}"
    )
    if num_allowed < num_longest:
        raise ResourceExhausted(
            f"a KV cache with room for one sequence of {info.max_seq_len} tokens needs "
            f"{_size(num_longest * block_bytes)}, and {allowed}; raise the fraction, free "
            f"some memory, or build with a smaller max_seq_len"
        )
    if settings.max_kv_tokens:
        logger.warning("%s, and %s: it gets %d tokens", wanted, allowed, tokens(num_allowed))
    else:  # the operator did not request a pool for the largest batch
        got = f"{tokens(num_allowed)} tokens ({_size(num_allowed * block_bytes)})"
        logger.info("the KV cache has %s: %s, and --kv-cache-fraction is %g", got, left, fraction)
    return num_allowed


def pool_with_states(
    info: EngineInfo, settings: EngineSettings, *, block_size: int, block_bytes: int, state_bytes: int,
    free_bytes: int, layers: WindowedLayers = NO_WINDOWS,
) -> tuple[int, int]:  # fmt: skip
    """Blocks as in `num_kv_blocks`, and slots for states of `state_bytes` each, if sequences have one.

    Each running sequence has a slot, unless that takes more than half of the memory. Additional slots, for states that
    other sequences may start from and for drafts, take as much memory as the blocks; at least one, if there is memory
    for it.
    """
    if not state_bytes:
        num_blocks = num_kv_blocks(
            info, settings, block_size=block_size, block_bytes=block_bytes, free_bytes=free_bytes, layers=layers
        )
        return num_blocks, 0
    if state_bytes > settings.kv_cache_fraction * free_bytes:
        raise ResourceExhausted(
            f"not enough memory for one sequence's state, which needs {state_bytes:,} bytes: the KV cache may have "
            f"{max(0, int(settings.kv_cache_fraction * free_bytes)):,}; raise --kv-cache-fraction, or free some memory"
        )
    fitting = int(settings.kv_cache_fraction * free_bytes) // (2 * state_bytes)
    num_running = max(1, min(info.max_batch_size, info.max_num_tokens, fitting))
    between = -(-state_bytes // block_bytes) if settings.scheduler.reuses_blocks else 0
    num_blocks = num_kv_blocks(
        info, settings, block_size=block_size,
        block_bytes=block_bytes + (-(-state_bytes // between) if between else 0),
        free_bytes=free_bytes - num_running * state_bytes, layers=layers,
    )  # fmt: skip
    num_left = (int(settings.kv_cache_fraction * free_bytes) - num_blocks * block_bytes) // state_bytes - num_running
    return num_blocks, num_running + max(num_blocks // between if between else 0, min(1, num_left))


def blocks_beside(theirs: PoolShape, ours: PoolShape, max_seq_len: int) -> Fraction:
    """Blocks that a pool of `ours` needs for each block of `theirs`, so that both have room for the same sequences,
    long and short."""
    longest = Fraction(ours.num_blocks_for(max_seq_len), theirs.num_blocks_for(max_seq_len))
    short = Fraction((1 + ours.layers.num_tables) * theirs.block_size, (1 + theirs.layers.num_tables) * ours.block_size)
    return max(longest, short)


def _num_wanted(info: EngineInfo, settings: EngineSettings, block_size: int, layers: WindowedLayers) -> int:
    if settings.max_kv_tokens:
        return -(-settings.max_kv_tokens // block_size) * (1 + layers.num_tables)
    num_blocks = -(-info.max_batch_size * info.max_seq_len // block_size)
    of_step = layers.num_tables * -(-info.max_num_tokens // block_size)  # blocks that a step holds until it ends
    return num_blocks + info.max_batch_size * layers.num_blocks_for(info.max_seq_len, block_size) + of_step


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 10 * 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
