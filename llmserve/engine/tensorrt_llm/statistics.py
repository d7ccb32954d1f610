"""Converts TensorRT-LLM's iteration statistics. Both modes have the same keys: those of IterationStats.to_json_str."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmserve.engine.base import EngineStats


def engine_stats(values: Mapping[str, Any]) -> EngineStats:
    """A missing key, as without in-flight batching or before the first step, counts as 0."""
    cache = values.get("kvCacheStats") or {}
    batching = values.get("inflightBatchingStats") or {}
    return EngineStats(
        iteration=_int(values, "iter"),
        num_waiting_requests=_int(values, "numQueuedRequests"),
        num_active_requests=_int(values, "numActiveRequests"),
        max_num_active_requests=_int(values, "maxNumActiveRequests"),
        num_scheduled_requests=_int(batching, "numScheduledRequests"),
        num_context_requests=_int(batching, "numContextRequests"),
        num_gen_requests=_int(batching, "numGenRequests"),
        num_paused_requests=_int(batching, "numPausedRequests"),
        num_ctx_tokens=_int(batching, "numCtxTokens"),
        micro_batch_id=_int(batching, "microBatchId"),
        tokens_per_block=_int(cache, "tokensPerBlock"),
        max_num_blocks=_int(cache, "maxNumBlocks"),
        free_num_blocks=_int(cache, "freeNumBlocks"),
        used_num_blocks=_int(cache, "usedNumBlocks"),
        reused_blocks=_int(cache, "reusedBlocks"),
        missed_blocks=_int(cache, "missedBlocks"),
        gpu_mem_usage=_int(values, "gpuMemUsage"),
        pinned_mem_usage=_int(values, "pinnedMemUsage"),
    )


def idle(stats: EngineStats) -> EngineStats:
    """No step runs without requests, so the last statistics would stay forever: nothing is in use then."""
    return replace(
        stats,
        num_waiting_requests=0,
        num_active_requests=0,
        num_scheduled_requests=0,
        num_context_requests=0,
        num_gen_requests=0,
        num_paused_requests=0,
        num_ctx_tokens=0,
        free_num_blocks=stats.max_num_blocks,
        used_num_blocks=0,
    )


def _int(values: Mapping[str, Any], key: str) -> int:
    return int(values.get(key) or 0)
