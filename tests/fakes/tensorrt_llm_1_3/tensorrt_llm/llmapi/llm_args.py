import enum
from dataclasses import dataclass
from typing import Any


class CapacitySchedulerPolicy(enum.Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


@dataclass(kw_only=True)
class SchedulerConfig:
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Any = None
    dynamic_batch_config: Any = None


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    dtype: str = "auto"
    tokens_per_block: int = 32


@dataclass
class FieldInfo:
    """Of pydantic: what a model's field is."""

    required: bool = False

    def is_required(self) -> bool:
        return self.required


class TorchLlmArgs:
    """What LLM takes beyond its own parameters; others are refused."""

    model_fields = {  # noqa: RUF012
        "model": FieldInfo(required=True),
        **{
            name: FieldInfo()
            for name in (
                "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size",
                "dtype", "revision", "tokenizer_revision", "pipeline_parallel_size", "kv_cache_config",
                "scheduler_config", "enable_chunked_prefill", "max_batch_size", "max_num_tokens", "max_seq_len",
                "max_beam_width", "iter_stats_max_iterations", "enable_iter_perf_stats", "guided_decoding_backend",
                "enable_lora", "gather_generation_logits", "num_postprocess_workers", "return_perf_metrics",
                "perf_metrics_max_requests",
            )
        },
    }  # fmt: skip
