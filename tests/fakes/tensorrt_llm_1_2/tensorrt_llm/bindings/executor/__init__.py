"""tensorrt_llm.bindings.executor of release 1.2."""

from tensorrt_llm.bindings.executor.config import (
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    KvCacheConfig,
    OrchestratorConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tensorrt_llm.bindings.executor.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    FinishReason,
    ModelType,
    RequestType,
)
from tensorrt_llm.bindings.executor.executor import Executor
from tensorrt_llm.bindings.executor.request import OutputConfig, Request, SamplingConfig
from tensorrt_llm.bindings.executor.response import (
    IterationStats,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    TimingMetrics,
)

__all__ = [
    "BatchingType", "CapacitySchedulerPolicy", "CommunicationMode", "CommunicationType", "ContextChunkingPolicy",
    "Executor", "ExecutorConfig", "ExtendedRuntimePerfKnobConfig", "FinishReason", "IterationStats", "KvCacheConfig",
    "KvCacheMetrics", "ModelType", "OrchestratorConfig", "OutputConfig", "ParallelConfig", "Request",
    "RequestPerfMetrics", "RequestType", "Response", "Result", "SamplingConfig", "SchedulerConfig", "TimingMetrics",
]  # fmt: skip
