"""Every name of tensorrt_llm that we use, and how; an installed package is checked against this table.

The names are from release 1.2 of the public source: tensorrt_llm/builder.py, plugin/plugin.py,
models/modeling_utils.py, cpp/tensorrt_llm/nanobind/executor/{executor,executorConfig,request}.cpp; for the LLM class
tensorrt_llm/llmapi/{llm,llm_args}.py, executor/result.py and sampling_params.py. This list has not been checked against
an installed wheel yet. A test records the arguments that we really pass, and compares them with this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from llmserve.engine.tensorrt_llm.library import Mode
from llmserve.engine.tensorrt_llm.signatures import call_problems, has_member

EXECUTOR = "tensorrt_llm.bindings.executor"


@dataclass(frozen=True, slots=True)
class Name:
    module: str
    attribute: str  # dotted: "Executor.cancel_request"
    parameters: tuple[str, ...] = ()  # that we pass by name
    num_positional: int = 0  # that we pass before these, by position
    members: tuple[str, ...] = ()  # of an enumeration; attributes of a class's objects
    is_called: bool = True

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


def _members(module: str, attribute: str, *members: str) -> Name:
    """An object whose members we read, but which we do not call."""
    return Name(module, attribute, members=members, is_called=False)


ENGINE_NAMES = (
    Name("tensorrt_llm.builder", "build", num_positional=2),
    Name("tensorrt_llm.builder", "Engine.save", num_positional=2),
    Name("tensorrt_llm.builder", "BuildConfig", (
        "max_batch_size", "opt_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width",
        "input_timing_cache", "output_timing_cache", "plugin_config",
    )),
    Name("tensorrt_llm.plugin", "PluginConfig", (
        "gpt_attention_plugin", "gemm_plugin", "weight_only_quant_matmul_plugin", "context_fmha",
        "remove_input_padding", "tokens_per_block", "multiple_profiles", "reduce_fusion", "use_fused_mlp",
    )),
    _members("tensorrt_llm.models", "MODEL_MAP"),
    Name("tensorrt_llm.models.modeling_utils", "PretrainedConfig.from_json_file", num_positional=1),
    Name("tensorrt_llm.models.modeling_utils", "PretrainedConfig.set_rank", num_positional=2),
    Name("tensorrt_llm.models.modeling_utils", "PretrainedModel.from_checkpoint", ("config",), num_positional=1),
    Name(EXECUTOR, "Executor", ("model_path", "model_type", "executor_config")),
    Name(EXECUTOR, "Executor.enqueue_request", num_positional=2),
    Name(EXECUTOR, "Executor.await_responses", ("timeout",), num_positional=1),
    Name(EXECUTOR, "Executor.cancel_request", num_positional=2),
    Name(EXECUTOR, "Executor.get_latest_iteration_stats", num_positional=1),
    Name(EXECUTOR, "Executor.can_enqueue_requests", num_positional=1),
    Name(EXECUTOR, "Executor.shutdown", num_positional=1),
    _members(EXECUTOR, "ModelType", "DECODER_ONLY"),
    _members(EXECUTOR, "CapacitySchedulerPolicy", "GUARANTEED_NO_EVICT", "MAX_UTILIZATION"),
    _members(EXECUTOR, "CommunicationType", "MPI"),
    _members(EXECUTOR, "CommunicationMode", "ORCHESTRATOR"),
    _members(EXECUTOR, "FinishReason", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED"),
    Name(EXECUTOR, "ExecutorConfig", (
        "max_beam_width", "scheduler_config", "kv_cache_config", "enable_chunked_context", "normalize_log_probs",
        "iter_stats_max_iterations", "parallel_config", "gpu_weights_percent", "extended_runtime_perf_knob_config",
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
    _members(EXECUTOR, "Response", "request_id", "has_error", "error_msg", "result"),
    _members(EXECUTOR, "Result", "is_final", "output_token_ids", "log_probs", "finish_reasons", "request_perf_metrics"),
    _members(EXECUTOR, "RequestPerfMetrics", "timing_metrics", "kv_cache_metrics"),
    _members(EXECUTOR, "TimingMetrics", "arrival_time", "first_scheduled_time"),
    _members(EXECUTOR, "KvCacheMetrics", "num_reused_blocks"),
    _members(EXECUTOR, "IterationStats", "to_json_str"),
    # what comes with it
    _members("torch", "ops.trtllm.symmetric_quantize_last_axis_of_batched_matrix"),
    _members("tensorrt", "__version__"),
)  # fmt: skip

LLM_NAMES = (
    Name("tensorrt_llm", "LLM", ("model", "skip_tokenizer_init")),
    Name("tensorrt_llm.llmapi.llm_args", "TorchLlmArgs", (  # arguments that LLM passes on
        "model", "skip_tokenizer_init", "tensor_parallel_size", "pipeline_parallel_size", "dtype", "max_batch_size",
        "max_num_tokens", "max_seq_len", "max_beam_width", "kv_cache_config", "scheduler_config",
        "enable_chunked_prefill", "enable_iter_perf_stats", "iter_stats_max_iterations",
    )),
    Name("tensorrt_llm", "LLM.generate_async", ("sampling_params", "streaming"), num_positional=2),
    Name("tensorrt_llm", "LLM.get_stats", ("timeout",), num_positional=1),
    Name("tensorrt_llm", "LLM.shutdown", num_positional=1),
    Name("tensorrt_llm", "SamplingParams", (
        "end_id", "pad_id", "max_tokens", "embedding_bias", "logits_processor", "n", "best_of", "use_beam_search",
        "top_k", "top_p", "min_p", "seed", "temperature", "min_tokens", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "length_penalty", "early_stopping", "beam_search_diversity_rate", "logprobs", "ignore_eos",
        "detokenize", "add_special_tokens",
    )),
    Name("tensorrt_llm.llmapi", "KvCacheConfig", (
        "enable_block_reuse", "max_tokens", "max_attention_window", "sink_token_length", "free_gpu_memory_fraction",
        "host_cache_size", "onboard_blocks", "tokens_per_block",
    )),
    Name("tensorrt_llm.llmapi", "SchedulerConfig", ("capacity_scheduler_policy",)),
    _members("tensorrt_llm.llmapi", "CapacitySchedulerPolicy", "GUARANTEED_NO_EVICT", "MAX_UTILIZATION"),
    _members("tensorrt_llm.llmapi", "RequestOutput", "outputs", "finished", "abort", "aresult", "__aiter__"),
    _members(
        "tensorrt_llm.llmapi", "CompletionOutput",
        "token_ids", "logprobs", "token_ids_diff", "logprobs_diff", "finish_reason", "stop_reason",
    ),
    _members("tensorrt_llm.llmapi", "RequestError"),
)  # fmt: skip
NAMES = {Mode.ENGINE: ENGINE_NAMES, Mode.LLM: LLM_NAMES}


@dataclass(frozen=True, slots=True)
class Comparison:
    """An installed package compared with the table."""

    num_names: int
    problems: tuple[str, ...]  # missing names, or names with other parameters
    untold: tuple[str, ...]  # existing names that do not document their parameters


def compare(mode: Mode) -> Comparison:
    """Imports tensorrt_llm."""
    found, untold = [], []
    for name in NAMES[mode]:
        try:
            thing = _find(name)
        except (ImportError, AttributeError, RuntimeError) as error:  # RuntimeError: torch, of an unknown operator
            found.append(f"{name}: {error}")
            continue
        found += [f"{name} has no {member}" for member in name.members if not has_member(thing, member)]
        if not name.is_called:
            continue
        texts = call_problems(thing, name.num_positional, name.parameters)
        if texts is None:
            untold.append(str(name))
        else:
            found += [f"{name} {text}" for text in texts]
    return Comparison(len(NAMES[mode]), tuple(found), tuple(untold))


def _find(name: Name) -> Any:
    found: Any = import_module(name.module)
    for part in name.attribute.split("."):
        found = getattr(found, part)
    return found
