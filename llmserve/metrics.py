"""Every metric that the server exports, declared once: name, kind, labels, help. Plain data; names are Triton's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: str  # Prometheus type: counter, gauge, summary or histogram
    help: str
    labels: tuple[str, ...] = ("model", "version")
    adds_up: bool = True  # over several front ends; else each of them tells of the same engine or machine


MODEL = ("model", "version")
GPU = ("gpu_uuid",)
KEY = ("key", "model")  # `key` is an API key's name

_INFERENCE = (
    Metric("nv_inference_request_success", "counter", "Number of successful inference requests, all batch sizes"),
    Metric(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        (*MODEL, "reason"),
    ),
    Metric("nv_inference_count", "counter", "Number of inferences performed (batch elements, without cached ones)"),
    Metric("nv_inference_exec_count", "counter", "Number of model executions performed (without cached requests)"),
    Metric("nv_inference_request_duration_us", "counter", "Cumulative inference request duration in microseconds"),
    Metric("nv_inference_queue_duration_us", "counter", "Cumulative inference queuing duration in microseconds"),
    Metric("nv_inference_compute_input_duration_us", "counter", "Cumulative compute input duration in microseconds"),
    Metric("nv_inference_compute_infer_duration_us", "counter", "Cumulative compute infer duration in microseconds"),
    Metric("nv_inference_compute_output_duration_us", "counter", "Cumulative compute output duration in microseconds"),
    Metric("nv_inference_pending_request_count", "gauge", "Number of requests that are waiting to be executed"),
    Metric("nv_inference_request_summary_us", "summary", "Inference request duration in microseconds"),
    Metric("nv_inference_queue_summary_us", "summary", "Inference queuing duration in microseconds"),
    Metric("nv_inference_compute_input_summary_us", "summary", "Compute input duration in microseconds"),
    Metric("nv_inference_compute_infer_summary_us", "summary", "Compute infer duration in microseconds"),
    Metric("nv_inference_compute_output_summary_us", "summary", "Compute output duration in microseconds"),
    Metric(
        "nv_inference_first_response_histogram_ms",
        "histogram",
        "Time from request to first response of decoupled models in milliseconds",
    ),
)
_CACHE = (
    Metric("nv_cache_num_hits_per_model", "counter", "Number of response cache hits of the model"),
    Metric("nv_cache_num_misses_per_model", "counter", "Number of response cache misses of the model"),
    Metric("nv_cache_hit_duration_per_model", "counter", "Cumulative look-up time of hits in microseconds"),
    Metric(
        "nv_cache_miss_duration_per_model", "counter", "Cumulative look-up and insertion time of misses in microseconds"
    ),
    Metric("nv_cache_hit_summary_per_model", "summary", "Look-up time of hits in microseconds"),
    Metric("nv_cache_miss_summary_per_model", "summary", "Look-up and insertion time of misses in microseconds"),
    Metric("nv_cache_num_entries", "gauge", "Number of responses stored in response cache", ()),
    Metric("nv_cache_num_lookups", "gauge", "Number of cache lookups in response cache", ()),
    Metric("nv_cache_num_hits", "gauge", "Number of cache hits in response cache", ()),
    Metric("nv_cache_num_misses", "gauge", "Number of cache misses in response cache", ()),
    Metric("nv_cache_num_evictions", "gauge", "Number of cache evictions in response cache", ()),
    Metric("nv_cache_lookup_duration", "gauge", "Total cache lookup duration (hit and miss) in microseconds", ()),
    Metric("nv_cache_insertion_duration", "gauge", "Total cache insertion duration in microseconds", ()),
    Metric("nv_cache_util", "gauge", "Cache utilization [0.0 - 1.0]", ()),
)
_MACHINE = (
    Metric("nv_cpu_utilization", "gauge", "CPU utilization rate [0.0 - 1.0]", ()),
    Metric("nv_cpu_memory_total_bytes", "gauge", "CPU total memory (RAM), in bytes", ()),
    Metric("nv_cpu_memory_used_bytes", "gauge", "CPU used memory (RAM), in bytes", ()),
    Metric("nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool total memory size, in bytes", ()),
    Metric("nv_pinned_memory_pool_used_bytes", "gauge", "Pinned memory pool used memory size, in bytes", ()),
    Metric("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0]", GPU),
    Metric("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes", GPU),
    Metric("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes", GPU),
    Metric("nv_gpu_power_usage", "gauge", "GPU power usage in watts", GPU),
    Metric("nv_gpu_power_limit", "gauge", "GPU power management limit in watts", GPU),
    Metric("nv_energy_consumption", "counter", "GPU energy consumption in joules since the server started", GPU),
)
_LLM = (
    Metric("nv_trt_llm_request_metrics", "gauge", "LLM requests by state", (*MODEL, "request_type")),
    Metric("nv_trt_llm_runtime_memory_metrics", "gauge", "LLM runtime memory in bytes", (*MODEL, "memory_type")),
    Metric("nv_trt_llm_kv_cache_block_metrics", "gauge", "Blocks of the KV cache", (*MODEL, "kv_cache_block_type")),
    Metric(
        "nv_trt_llm_inflight_batcher_metrics",
        "gauge",
        "State of the in-flight batcher",
        (*MODEL, "inflight_batcher_specific_metric"),
    ),
    Metric("nv_trt_llm_general_metrics", "gauge", "General LLM state", (*MODEL, "general_type")),
    Metric(
        "llmserve_engine_info",
        "gauge",
        "The engine that answers; always 1",
        (*MODEL, "name", "architecture", "target", "dtype", "digest", "max_seq_len", "max_batch_size"),
    ),
    Metric(
        "llmserve_engine_gate", "gauge", "Whether the engine has passed an evaluation", (*MODEL, "suite", "verdict")
    ),
    Metric("llmserve_engine_files_intact", "gauge", "Whether the engine's files are as they were built"),
    Metric("llmserve_engine_failed_replicas", "gauge", "Devices whose engine has failed and gets no more requests"),
    Metric("llmserve_engine_restarts_total", "counter", "How often the engine's own process was started again"),
    Metric("llmserve_prompt_tokens_total", "counter", "Tokens computed of prompts and of what was preempted"),
    Metric("llmserve_generation_tokens_total", "counter", "Tokens sampled"),
    Metric("llmserve_preemptions_total", "counter", "Answers that were preempted and computed again"),
    Metric("llmserve_drafted_tokens_total", "counter", "Tokens drafted by speculative decoding"),
    Metric("llmserve_accepted_tokens_total", "counter", "Drafted tokens that were accepted"),
    Metric("llmserve_stored_kv_blocks_total", "counter", "KV blocks written to the folder of --kv-cache-dir"),
    Metric("llmserve_restored_kv_blocks_total", "counter", "KV blocks read from there"),
    Metric("llmserve_sequence_states", "gauge", "Slots for states, of networks that have them", (*MODEL, "state_type")),
)
_ANSWERS = (
    Metric(
        "llmserve_adapter_requests_total",
        "counter",
        "Requests that an adapter has got under its name",
        (*MODEL, "adapter", "digest"),
    ),
    Metric("llmserve_time_to_first_token_seconds", "histogram", "From a request's arrival to its first token"),
    Metric("llmserve_time_per_output_token_seconds", "histogram", "Between an answer's tokens, on its average"),
    Metric("llmserve_e2e_request_latency_seconds", "histogram", "From a request's arrival to the end of its answer"),
    Metric("llmserve_request_queue_time_seconds", "histogram", "From a request's arrival to its first step"),
    Metric("llmserve_request_prompt_tokens", "histogram", "Tokens of a prompt"),
    Metric("llmserve_request_generation_tokens", "histogram", "Tokens of an answer"),
)
_ROLLOUT = (  # `version` is the candidate's; those of an adapter have a label `adapter`, too
    Metric("llmserve_rollout_state", "gauge", "1 for the state that the rollout is in", (*MODEL, "state")),
    Metric("llmserve_rollout_canary_share", "gauge", "Share of the requests that the candidate answers [0.0 - 1.0]"),
    Metric(
        "llmserve_rollout_requests_total", "counter", "Requests of a rollout that have ended",
        (*MODEL, "role", "outcome"),
    ),
    Metric(
        "llmserve_rollout_rescued_total", "counter", "Canary requests that the stable version has answered after all"
    ),
    Metric("llmserve_rollout_compared_total", "counter", "Answers of both versions, compared", (*MODEL, "result")),
    Metric(
        "llmserve_rollout_latency_ratio", "gauge", "The candidate's median latency by the stable version's",
        (*MODEL, "latency"),
    ),
)  # fmt: skip
_KEY = (
    Metric("llmserve_key_requests_total", "counter", "Requests of an API key that have ended", (*KEY, "outcome")),
    Metric("llmserve_key_refusals_total", "counter", "Requests of an API key that were refused", (*KEY, "limit")),
    Metric("llmserve_key_requests_in_flight", "gauge", "Requests of an API key that are being answered", KEY),
    Metric("llmserve_key_prompt_tokens_total", "counter", "Tokens of an API key's prompts", KEY),
    Metric("llmserve_key_generation_tokens_total", "counter", "Tokens of an API key's answers", KEY),
    Metric("llmserve_key_queue_time_seconds", "summary", "From an API key's request to its first step", KEY),
    Metric("llmserve_key_preemptions_total", "counter", "How often an API key's answers were preempted", KEY),
)

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        *_INFERENCE, *_CACHE, *_ANSWERS, *_ROLLOUT, *_KEY,
        *(replace(metric, adds_up=False) for metric in (*_MACHINE, *_LLM)),
    )
}  # fmt: skip
