"""Engine statistics as the gauges that Triton exports for TensorRT-LLM models, and those that Triton does not have."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psutil

from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.directory.gate_record import GateRecord
from llmserve.serving.backend import GaugeSample


def engine_gauges(stats: EngineStats) -> Sequence[GaugeSample]:
    families: dict[tuple[str, str], dict[str, float]] = {
        ("nv_trt_llm_request_metrics", "request_type"): {
            "active": stats.num_active_requests,
            "max": stats.max_num_active_requests,
            "scheduled": stats.num_scheduled_requests,
            "context": stats.num_context_requests,
            "waiting": stats.num_waiting_requests,
        },
        ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): {
            "max": stats.max_num_blocks,
            "free": stats.free_num_blocks,
            "used": stats.used_num_blocks,
            "tokens_per": stats.tokens_per_block,
            "reused": stats.reused_blocks,
            "fraction": stats.used_num_blocks / max(1, stats.max_num_blocks),
        },
        ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
            "total_context_tokens": stats.num_ctx_tokens,
            "generation_requests": stats.num_gen_requests,
            "micro_batch_id": stats.micro_batch_id,
            "paused_requests": stats.num_paused_requests,
        },
        ("nv_trt_llm_runtime_memory_metrics", "memory_type"): {
            "cpu": psutil.Process().memory_info().rss,
            "gpu": stats.gpu_mem_usage,
            "pinned": stats.pinned_mem_usage,
        },
        ("nv_trt_llm_general_metrics", "general_type"): {
            "timestamp": time.time(),
            "iteration_counter": stats.iteration,
        },
    }
    if stats.max_num_states:
        families["llmserve_sequence_states", "state_type"] = {
            "max": stats.max_num_states,
            "free": stats.free_num_states,
            "used": stats.max_num_states - stats.free_num_states,
        }
    return [
        (family, {label: kind}, float(value))
        for (family, label), values in families.items()
        for kind, value in values.items()
    ]


def engine_facts(info: EngineInfo, stats: EngineStats, gates: Sequence[GateRecord]) -> Sequence[GaugeSample]:
    """The engine's identity, its gate records, and its counters if it has them."""
    labels = {
        "name": info.name,
        "architecture": info.architecture,
        "target": info.target,
        "dtype": info.dtype,
        "digest": info.digest,
        "max_seq_len": str(info.max_seq_len),
        "max_batch_size": str(info.max_batch_size),
    }
    counts = {
        "llmserve_engine_failed_replicas": stats.num_failed_replicas,
        "llmserve_engine_restarts_total": stats.num_restarts,
        "llmserve_prompt_tokens_total": stats.total_ctx_tokens,
        "llmserve_generation_tokens_total": stats.total_gen_tokens,
        "llmserve_preemptions_total": stats.total_preemptions,
        "llmserve_drafted_tokens_total": stats.total_drafted_tokens,
        "llmserve_accepted_tokens_total": stats.total_accepted_tokens,
        "llmserve_stored_kv_blocks_total": stats.total_stored_blocks,
        "llmserve_restored_kv_blocks_total": stats.total_restored_blocks,
    }
    counted: list[GaugeSample] = [(family, {}, float(count)) for family, count in counts.items() if count is not None]
    verdicts: list[GaugeSample] = [
        ("llmserve_engine_gate", {"suite": gate.suite, "verdict": gate.verdict}, float(gate.passed)) for gate in gates
    ]
    return [("llmserve_engine_info", labels, 1.0), *verdicts, *counted]
