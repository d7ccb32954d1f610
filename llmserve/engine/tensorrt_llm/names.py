"""Every name of tensorrt_llm that we use, with the parameters that we pass: an installed package is checked against it.

Where the names are from: release 1.2 of the public source. tensorrt_llm/builder.py, plugin/plugin.py,
models/modeling_utils.py, cpp/tensorrt_llm/nanobind/executor/{executor,executorConfig,request}.cpp; for the LLM class
tensorrt_llm/llmapi/{llm,llm_args}.py and sampling_params.py. Nobody has run this list against an installed wheel yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from llmserve.engine.tensorrt_llm.library import Mode

EXECUTOR = "tensorrt_llm.bindings.executor"


@dataclass(frozen=True, slots=True)
class Name:
    module: str
    attribute: str  # dotted: "Executor.cancel_request"
    parameters: tuple[str, ...] = ()
    members: tuple[str, ...] = ()  # of an enumeration, or attributes of a class

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


ENGINE_NAMES = (
    Name("tensorrt_llm.builder", "build", ("model", "build_config")),
    Name("tensorrt_llm.builder", "Engine.save", ("engine_dir",)),
    Name("tensorrt_llm.builder", "BuildConfig", (
        "max_batch_size", "opt_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width",
        "input_timing_cache", "output_timing_cache", "plugin_config",
    )),
    Name("tensorrt_llm.plugin", "PluginConfig", (
        "gpt_attention_plugin", "gemm_plugin", "weight_only_quant_matmul_plugin", "context_fmha",
        "remove_input_padding", "tokens_per_block", "multiple_profiles", "reduce_fusion", "use_fused_mlp",
    )),
    Name("tensorrt_llm.models", "MODEL_MAP"),
    Name("tensorrt_llm.models.modeling_utils", "PretrainedConfig.from_json_file", ("config_file",)),
    Name("tensorrt_llm.models.modeling_utils", "PretrainedConfig.set_rank", ("rank",)),
    Name("tensorrt_llm.models.modeling_utils", "PretrainedModel.from_checkpoint", ("ckpt_dir", "config")),
    Name(EXECUTOR, "Executor", ("model_path", "model_type", "executor_config")),
    Name(EXECUTOR, "Executor.enqueue_request", ("request",)),
    Name(EXECUTOR, "Executor.await_responses", ("timeout",)),
    Name(EXECUTOR, "Executor.cancel_request", ("id",)),
    Name(EXECUTOR, "Executor.get_latest_iteration_stats"),
    Name(EXECUTOR, "Executor.can_enqueue_requests"),
    Name(EXECUTOR, "Executor.shutdown"),
    Name(EXECUTOR, "ModelType", members=("DECODER_ONLY",)),
    Name(EXECUTOR, "CapacitySchedulerPolicy", members=("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")),
    Name(EXECUTOR, "CommunicationType", members=("MPI",)),
    Name(EXECUTOR, "CommunicationMode", members=("LEADER", "ORCHESTRATOR")),
    Name(EXECUTOR, "FinishReason", members=(
        "NOT_FINISHED", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED",
    )),
    Name(EXECUTOR, "ExecutorConfig", (
        "max_beam_width", "scheduler_config", "kv_cache_config", "enable_chunked_context", "normalize_log_probs",
        "iter_stats_max_iterations", "max_batch_size", "max_num_tokens", "parallel_config", "gpu_weights_percent",
        "extended_runtime_perf_knob_config",
    )),
    Name(EXECUTOR, "SchedulerConfig", ("capacity_scheduler_policy",)),
    Name(EXECUTOR, "KvCacheConfig", (
        "enable_block_reuse", "max_tokens", "max_attention_window", "sink_token_length", "free_gpu_memory_fraction",
        "host_cache_size", "onboard_blocks",
    )),
    Name(EXECUTOR, "ExtendedRuntimePerfKnobConfig", (
        "multi_block_mode", "enable_context_fmha_fp32_acc", "cuda_graph_mode", "cuda_graph_cache_size",
    )),
    Name(EXECUTOR, "ParallelConfig", (
        "communication_type", "communication_mode", "device_ids", "orchestrator_config",
    )),
    Name(EXECUTOR, "OrchestratorConfig", ("is_orchestrator", "worker_executable_path")),
    Name(EXECUTOR, "Request", (
        "input_token_ids", "max_tokens", "streaming", "sampling_config", "output_config", "end_id", "pad_id",
        "bad_words", "stop_words", "embedding_bias", "priority", "allotted_time_ms",
    )),
    Name(EXECUTOR, "SamplingConfig", (
        "beam_width", "top_k", "top_p", "min_p", "seed", "temperature", "min_tokens", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "length_penalty", "early_stopping", "beam_search_diversity_rate",
    )),
    Name(EXECUTOR, "OutputConfig", ("return_log_probs", "exclude_input_from_output", "return_perf_metrics")),
    Name(EXECUTOR, "Response", members=("request_id", "has_error", "error_msg", "result")),
    Name(EXECUTOR, "Result", members=(
        "is_final", "output_token_ids", "log_probs", "cum_log_probs", "finish_reasons", "request_perf_metrics",
    )),
    Name(EXECUTOR, "IterationStats", members=("to_json_str",)),
)  # fmt: skip

LLM_NAMES = (
    Name("tensorrt_llm", "LLM", ("model", "skip_tokenizer_init", "tensor_parallel_size", "dtype")),
    Name("tensorrt_llm", "LLM.generate_async", ("inputs", "sampling_params", "streaming")),
    Name("tensorrt_llm", "LLM.get_stats", ("timeout",)),
    Name("tensorrt_llm", "LLM.shutdown"),
    Name("tensorrt_llm", "SamplingParams", (
        "end_id", "pad_id", "max_tokens", "bad_token_ids", "stop_token_ids", "embedding_bias", "logits_processor", "n",
        "best_of", "use_beam_search", "top_k", "top_p", "min_p", "seed", "temperature", "min_tokens",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "early_stopping",
        "beam_search_diversity_rate", "logprobs", "ignore_eos", "detokenize", "add_special_tokens",
    )),
    Name("tensorrt_llm.llmapi", "KvCacheConfig", (
        "enable_block_reuse", "max_tokens", "max_attention_window", "sink_token_length", "free_gpu_memory_fraction",
        "host_cache_size", "onboard_blocks", "tokens_per_block",
    )),
    Name("tensorrt_llm.llmapi", "SchedulerConfig", ("capacity_scheduler_policy",)),
    Name("tensorrt_llm.llmapi", "CapacitySchedulerPolicy", members=("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")),
    Name("tensorrt_llm.llmapi", "RequestError"),
)  # fmt: skip
NAMES = {Mode.ENGINE: ENGINE_NAMES, Mode.LLM: LLM_NAMES}


def problems(mode: Mode) -> Iterator[str]:
    """What the installed package lacks of the names of `mode`. Imports tensorrt_llm."""
    for name in NAMES[mode]:
        try:
            found: Any = import_module(name.module)
            for part in name.attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {error}"
            continue
        yield from (f"{name} has no {member}" for member in name.members if not hasattr(found, member))
        known = _parameters(found)
        if known is not None:
            yield from (
                f"{name} takes no parameter {parameter}" for parameter in name.parameters if parameter not in known
            )


def _parameters(found: Any) -> str | frozenset[str] | None:
    """Names of parameters, or a text that holds them (compiled functions have only their documentation).

    None when anything may be passed.
    """
    if fields := getattr(found, "model_fields", None):  # pydantic's __init__ is (**data)
        return frozenset(fields)
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return f"{found.__doc__} {getattr(found, '__init__', found).__doc__}"
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_more else frozenset(parameters)
