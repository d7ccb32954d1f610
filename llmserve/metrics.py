"""Every metric that the server exports, declared once: name, kind, labels, help. Plain data; names are Triton's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial


@dataclass(frozen=True, slots=True)
class Metric:
    kind: str  # Prometheus type
    name: str
    help: str
    labels: tuple[str, ...] = ("model", "version")
    adds_up: bool = True  # values of several front ends are added; False: they all describe the same engine or machine


MODEL = ("model", "version")
GPU = ("gpu_uuid",)
KEY = ("key", "model")  # `key` is an API key's name

counter, gauge = partial(Metric, "counter"), partial(Metric, "gauge")
summary, histogram = partial(Metric, "summary"), partial(Metric, "histogram")

_INFERENCE = (
    counter("nv_inference_request_success", "Number of successful inference requests, all batch sizes"),
    counter("nv_inference_request_failure", "Number of failed inference requests, all batch sizes", (*MODEL, "reason")),
    counter("nv_inference_count", "Number of inferences performed (batch elements, without cached ones)"),
    counter("nv_inference_exec_count", "Number of model executions performed (without cached requests)"),
    counter("nv_inference_request_duration_us", "Cumulative inference request duration in microseconds"),
    counter("nv_inference_queue_duration_us", "Cumulative inference queuing duration in microseconds"),
    counter("nv_inference_compute_input_duration_us", "Cumulative compute input duration in microseconds"),
    counter("nv_inference_compute_infer_duration_us", "Cumulative compute infer duration in microseconds"),
    counter("nv_inference_compute_output_duration_us", "Cumulative compute output duration in microseconds"),
    gauge("nv_inference_pending_request_count", "Number of requests that are waiting to be executed"),
    gauge("nv_model_load_duration_secs", "Model load time in seconds", adds_up=False),
    summary("nv_inference_request_summary_us", "Inference request duration in microseconds"),
    summary("nv_inference_queue_summary_us", "Inference queuing duration in microseconds"),
    summary("nv_inference_compute_input_summary_us", "Compute input duration in microseconds"),
    summary("nv_inference_compute_infer_summary_us", "Compute infer duration in microseconds"),
    summary("nv_inference_compute_output_summary_us", "Compute output duration in microseconds"),
    histogram(
        "nv_inference_first_response_histogram_ms",
        "Time from request to first response of decoupled models in milliseconds",
    ),
)
_CACHE = (
    counter("nv_cache_num_hits_per_model", "Number of response cache hits of the model"),
    counter("nv_cache_num_misses_per_model", "Number of response cache misses of the model"),
    counter("nv_cache_hit_duration_per_model", "Cumulative look-up time of hits in microseconds"),
    counter("nv_cache_miss_duration_per_model", "Cumulative look-up and insertion time of misses in microseconds"),
    summary("nv_cache_hit_summary_per_model", "Look-up time of hits in microseconds"),
    summary("nv_cache_miss_summary_per_model", "Look-up and insertion time of misses in microseconds"),
    gauge("nv_cache_num_entries", "Number of responses stored in response cache", ()),
    gauge("nv_cache_num_lookups", "Number of cache lookups in response cache", ()),
    gauge("nv_cache_num_hits", "Number of cache hits in response cache", ()),
    gauge("nv_cache_num_misses", "Number of cache misses in response cache", ()),
    gauge("nv_cache_num_evictions", "Number of cache evictions in response cache", ()),
    gauge("nv_cache_lookup_duration", "Total cache lookup duration (hit and miss) in microseconds", ()),
    gauge("nv_cache_insertion_duration", "Total cache insertion duration in microseconds", ()),
    gauge("nv_cache_util", "Cache utilization [0.0 - 1.0]", ()),
)
_MACHINE = (
    gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", ()),
    gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", ()),
    gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", ()),
    gauge("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", ()),
    gauge("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", ()),
    gauge("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0]", GPU),
    gauge("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", GPU),
    gauge("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", GPU),
    gauge("nv_gpu_power_usage", "GPU power usage in watts", GPU),
    gauge("nv_gpu_power_limit", "GPU power management limit in watts", GPU),
    counter("nv_energy_consumption", "GPU energy consumption in joules since the server started", GPU),
)
_LLM = (
    gauge("nv_trt_llm_request_metrics", "LLM requests by state", (*MODEL, "request_type")),
    gauge("nv_trt_llm_runtime_memory_metrics", "LLM runtime memory in bytes", (*MODEL, "memory_type")),
    gauge("nv_trt_llm_kv_cache_block_metrics", "Blocks of the KV cache", (*MODEL, "kv_cache_block_type")),
    gauge(
        "nv_trt_llm_inflight_batcher_metrics",
        "State of the in-flight batcher",
        (*MODEL, "inflight_batcher_specific_metric"),
    ),
    gauge("nv_trt_llm_general_metrics", "General LLM state", (*MODEL, "general_type")),
    gauge(
        "llmserve_engine_info",
        "The engine that answers; always 1",
        (*MODEL, "name", "architecture", "target", "dtype", "digest", "max_seq_len", "max_batch_size"),
    ),
    gauge("llmserve_engine_gate", "Whether the engine has passed an evaluation", (*MODEL, "suite", "verdict")),
    gauge("llmserve_engine_files_intact", "Whether the engine's files are as they were built"),
    gauge("llmserve_engine_failed_replicas", "Devices whose engine has failed and gets no more requests"),
    counter("llmserve_engine_restarts_total", "How often the engine's own process was started again"),
    counter("llmserve_prompt_tokens_total", "Tokens computed of prompts and of what was preempted"),
    counter("llmserve_generation_tokens_total", "Tokens sampled"),
    counter("llmserve_preemptions_total", "Answers that were preempted and computed again"),
    counter("llmserve_drafted_tokens_total", "Tokens drafted by speculative decoding"),
    counter("llmserve_accepted_tokens_total", "Drafted tokens that were accepted"),
    counter("llmserve_stored_kv_blocks_total", "KV blocks written to the folder of --kv-cache-dir"),
    counter("llmserve_restored_kv_blocks_total", "KV blocks read from there"),
    gauge("llmserve_sequence_states", "Slots for states, of networks that have them", (*MODEL, "state_type")),
)
_ANSWERS = (
    counter(
        "llmserve_adapter_requests_total",
        "Requests that an adapter has got under its name",
        (*MODEL, "adapter", "digest"),
    ),
    histogram("llmserve_time_to_first_token_seconds", "From a request's arrival to its first token"),
    histogram("llmserve_time_per_output_token_seconds", "Between an answer's tokens, on its average"),
    histogram("llmserve_e2e_request_latency_seconds", "From a request's arrival to the end of its answer"),
    histogram("llmserve_request_queue_time_seconds", "From a request's arrival to its first step"),
    histogram("llmserve_request_prompt_tokens", "Tokens of a prompt"),
    histogram("llmserve_request_generation_tokens", "Tokens of an answer"),
)
_ROLLOUT = (  # `version` is the candidate's; metrics of an adapter also have a label `adapter`
    gauge("llmserve_rollout_state", "1 for the state that the rollout is in", (*MODEL, "state")),
    gauge("llmserve_rollout_canary_share", "Share of the requests that the candidate answers [0.0 - 1.0]"),
    counter("llmserve_rollout_requests_total", "Requests of a rollout that have ended", (*MODEL, "role", "outcome")),
    counter("llmserve_rollout_rescued_total", "Canary requests that the stable version has answered after all"),
    counter("llmserve_rollout_compared_total", "Answers of both versions, compared", (*MODEL, "result")),
    gauge(
        "llmserve_rollout_latency_ratio",
        "The candidate's median latency by the stable version's",
        (*MODEL, "latency"),
    ),
)
_KEY = (
    counter("llmserve_key_requests_total", "Requests of an API key that have ended", (*KEY, "outcome")),
    counter("llmserve_key_refusals_total", "Requests of an API key that were refused", (*KEY, "limit")),
    gauge("llmserve_key_requests_in_flight", "Requests of an API key that are being answered", KEY),
    counter("llmserve_key_prompt_tokens_total", "Tokens of an API key's prompts", KEY),
    counter("llmserve_key_generation_tokens_total", "Tokens of an API key's answers", KEY),
    summary("llmserve_key_queue_time_seconds", "From an API key's request to its first step", KEY),
    counter("llmserve_key_preemptions_total", "How often an API key's answers were preempted", KEY),
)

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        *_INFERENCE, *_CACHE, *_ANSWERS, *_ROLLOUT, *_KEY,
        *(replace(metric, adds_up=False) for metric in (*_MACHINE, *_LLM)),
    )
}  # fmt: skip
