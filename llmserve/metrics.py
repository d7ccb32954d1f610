"""Every metric that the server exports, declared once: name, kind, labels, help. Plain data; names are Triton's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: str  # Prometheus type: counter or gauge
    help: str
    labels: tuple[str, ...] = ("model", "version")


_MODEL = ("model", "version")

_DECLARED = (
    Metric("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes"),
    Metric(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        (*_MODEL, "reason"),
    ),
    Metric("nv_inference_count", "counter", "Number of inferences performed (batch elements)"),
    Metric("nv_inference_exec_count", "counter", "Number of model executions performed"),
    Metric("nv_inference_request_duration_us", "counter", "Cumulative inference request duration in microseconds"),
    Metric("nv_inference_queue_duration_us", "counter", "Cumulative inference queuing duration in microseconds"),
    Metric("nv_inference_compute_input_duration_us", "counter", "Cumulative compute input duration in microseconds"),
    Metric("nv_inference_compute_infer_duration_us", "counter", "Cumulative compute infer duration in microseconds"),
    Metric("nv_inference_compute_output_duration_us", "counter", "Cumulative compute output duration in microseconds"),
    Metric("nv_inference_pending_request_count", "gauge", "Number of requests that are waiting to be executed"),
    Metric("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]", ()),
    Metric("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes", ()),
    Metric("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes", ()),
    Metric("nv_trt_llm_request_metrics", "gauge", "LLM requests by state", (*_MODEL, "request_type")),
    Metric("nv_trt_llm_runtime_memory_metrics", "gauge", "LLM runtime memory in bytes", (*_MODEL, "memory_type")),
    Metric(
        "nv_trt_llm_kv_cache_block_metrics", "gauge", "Blocks of the KV cache", (*_MODEL, "kv_cache_block_type")
    ),
    Metric(
        "nv_trt_llm_inflight_batcher_metrics",
        "gauge",
        "State of the in-flight batcher",
        (*_MODEL, "inflight_batcher_specific_metric"),
    ),
    Metric("nv_trt_llm_general_metrics", "gauge", "General LLM state", (*_MODEL, "general_type")),
)  # fmt: skip

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _DECLARED}
