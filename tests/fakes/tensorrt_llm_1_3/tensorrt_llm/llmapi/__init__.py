from tensorrt_llm.executor.result import CompletionOutput, RequestError, RequestOutput
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.llmapi.llm_args import CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig, TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams

__all__ = [
    "LLM", "CapacitySchedulerPolicy", "CompletionOutput", "KvCacheConfig", "RequestError", "RequestOutput",
    "SamplingParams", "SchedulerConfig", "TorchLlmArgs",
]  # fmt: skip
