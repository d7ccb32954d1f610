"""What an executor is opened with."""

from typing import Any

from tensorrt_llm.bindings.executor.checks import check, check_list
from tensorrt_llm.bindings.executor.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
)


class SchedulerConfig:
    def __init__(self, capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
                 context_chunking_policy: Any = None, dynamic_batch_config: Any = None) -> None:  # fmt: skip
        check("capacity_scheduler_policy", capacity_scheduler_policy, CapacitySchedulerPolicy)
        self.capacity_scheduler_policy = capacity_scheduler_policy


class KvCacheConfig:
    def __init__(self, enable_block_reuse: bool = True, max_tokens: int | None = None,
                 max_attention_window: list[int] | None = None, sink_token_length: int | None = None,
                 free_gpu_memory_fraction: float | None = None, host_cache_size: int | None = None,
                 onboard_blocks: bool = True, cross_kv_cache_fraction: float | None = None,
                 secondary_offload_min_priority: int | None = None, event_buffer_max_size: int = 0, *,
                 enable_partial_reuse: bool = True, copy_on_partial_reuse: bool = True, use_uvm: bool = False,
                 attention_dp_events_gather_period_ms: int = 5, runtime_defaults: Any = None,
                 max_gpu_total_bytes: int = 0) -> None:  # fmt: skip
        check("enable_block_reuse", enable_block_reuse, bool)
        check("max_tokens", max_tokens, int, optional=True)
        check("onboard_blocks", onboard_blocks, bool)
        check("host_cache_size", host_cache_size, int, optional=True)
        check("sink_token_length", sink_token_length, int, optional=True)
        check("free_gpu_memory_fraction", free_gpu_memory_fraction, float, optional=True)
        if max_attention_window is not None:
            check_list("max_attention_window", max_attention_window, int)
        self.enable_block_reuse = enable_block_reuse
        self.max_tokens = max_tokens
        self.max_attention_window = max_attention_window
        self.sink_token_length = sink_token_length
        self.free_gpu_memory_fraction = free_gpu_memory_fraction
        self.host_cache_size = host_cache_size
        self.onboard_blocks = onboard_blocks


class ExtendedRuntimePerfKnobConfig:
    def __init__(self, multi_block_mode: bool = True, enable_context_fmha_fp32_acc: bool = False,
                 cuda_graph_mode: bool = False, cuda_graph_cache_size: int = 0) -> None:  # fmt: skip
        check("multi_block_mode", multi_block_mode, bool)
        check("enable_context_fmha_fp32_acc", enable_context_fmha_fp32_acc, bool)
        check("cuda_graph_mode", cuda_graph_mode, bool)
        check("cuda_graph_cache_size", cuda_graph_cache_size, int)
        self.multi_block_mode = multi_block_mode
        self.cuda_graph_mode = cuda_graph_mode


class OrchestratorConfig:
    def __init__(self, is_orchestrator: bool = True, worker_executable_path: str = "", orch_leader_comm: Any = None,
                 spawn_processes: bool = True) -> None:  # fmt: skip
        check("is_orchestrator", is_orchestrator, bool)
        check("worker_executable_path", worker_executable_path, str)
        self.worker_executable_path = worker_executable_path


class ParallelConfig:
    def __init__(self, communication_type: CommunicationType = CommunicationType.MPI,
                 communication_mode: CommunicationMode = CommunicationMode.LEADER, device_ids: list[int] | None = None,
                 participant_ids: list[int] | None = None, orchestrator_config: OrchestratorConfig | None = None,
                 num_nodes: int | None = None) -> None:  # fmt: skip
        check("communication_mode", communication_mode, CommunicationMode)
        if device_ids is not None:
            check_list("device_ids", device_ids, int)
        self.communication_mode = communication_mode
        self.device_ids = device_ids
        self.orchestrator_config = orchestrator_config


class ExecutorConfig:
    def __init__(self, max_beam_width: int = 1, scheduler_config: SchedulerConfig | None = None,
                 kv_cache_config: KvCacheConfig | None = None, enable_chunked_context: bool = False,
                 normalize_log_probs: bool = True, iter_stats_max_iterations: int = 1000,
                 request_stats_max_iterations: int = 0, batching_type: BatchingType = BatchingType.INFLIGHT,
                 max_batch_size: int | None = None, max_num_tokens: int | None = None,
                 parallel_config: ParallelConfig | None = None, peft_cache_config: Any = None,
                 logits_post_processor_config: Any = None, decoding_config: Any = None,
                 use_gpu_direct_storage: bool = False, gpu_weights_percent: float = 1.0,
                 max_queue_size: int | None = None,
                 extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig | None = None,
                 debug_config: Any = None, recv_poll_period_ms: int = 0, max_seq_idle_microseconds: int = 180000000,
                 spec_dec_config: Any = None, guided_decoding_config: Any = None, additional_model_outputs: Any = None,
                 cache_transceiver_config: Any = None, gather_generation_logits: bool = False,
                 mm_embedding_offloading: bool = False, enable_trt_overlap: bool = False,
                 fail_fast_on_attention_window_too_large: bool = False) -> None:  # fmt: skip
        check("max_beam_width", max_beam_width, int)
        check("enable_chunked_context", enable_chunked_context, bool)
        check("normalize_log_probs", normalize_log_probs, bool)
        check("iter_stats_max_iterations", iter_stats_max_iterations, int)
        check("gpu_weights_percent", gpu_weights_percent, float)
        self.max_beam_width = max_beam_width
        self.scheduler_config = scheduler_config or SchedulerConfig()
        self.kv_cache_config = kv_cache_config or KvCacheConfig()
        self.enable_chunked_context = enable_chunked_context
        self.normalize_log_probs = normalize_log_probs
        self.iter_stats_max_iterations = iter_stats_max_iterations
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.parallel_config = parallel_config
        self.gpu_weights_percent = gpu_weights_percent
        self.extended_runtime_perf_knob_config = extended_runtime_perf_knob_config
