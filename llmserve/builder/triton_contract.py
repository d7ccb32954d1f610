"""The tensors and parameters of TensorRT-LLM's own Triton backend, as of release 25.05: what `--backend tensorrtllm`
keeps of the packaged configs, and what it adds.

From the public source of that release: inflight_batcher_llm/src/{model_state,model_instance_state}.cc read the
parameters, and all_models/inflight_batcher_llm/*/config.pbtxt list the tensors. A number or flag that is not set has
its default; three strings (tokenizer_dir, guided_decoding_backend, xgrammar_tokenizer_info_path) must be present, but
may be empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.scheduler.settings import SchedulerSettings

TENSORRT_LLM_RELEASE = "1.2"
ENGINE_MODEL = "tensorrt_llm"  # the model of the packaged pipelines, not the target of the same name
WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
# llmserve's own, or from v0.7.1: the compiled backend has no such tensor
FOREIGN_INPUTS = (
    "stop_words", "min_p", "min_length", "random_seed", "prompt_warning", "return_receipt", "speculation",
    "num_draft_tokens",
)  # fmt: skip
FOREIGN_OUTPUTS = (
    "window_ids", "tail_text", "finish_reason", "stop_word", "num_prompt_tokens", "num_cached_tokens",
    "num_completion_tokens", "warning", "receipt",
)  # fmt: skip


def compiled_model(config: ModelConfig, engine: EngineDirectory, engine_path: Path) -> ModelConfig:
    """The packaged `tensorrt_llm` model for the compiled backend, which finds the engine in `engine_path`."""
    made = ModelConfig()
    made.CopyFrom(config)
    _keep(made.input, (tensor for tensor in config.input if tensor.name not in FOREIGN_INPUTS))
    _keep(made.output, (tensor for tensor in config.output if tensor.name not in FOREIGN_OUTPUTS))
    made.output.add(name="context_phase_params", data_type=DataType.TYPE_UINT8, dims=[-1])
    made.dynamic_batching.preferred_batch_size.append(config.max_batch_size)
    made.dynamic_batching.default_queue_policy.max_queue_size = SchedulerSettings().max_queue_size
    made.parameters.clear()
    for key, value in parameters(engine, engine_path).items():
        made.parameters[key].string_value = value
    return made


def parameters(engine: EngineDirectory, engine_path: Path) -> Mapping[str, str]:
    """All parameters that are set. The others have a meaning when unset, or configure features that we lack."""
    limits: Mapping[str, Any] = engine.config.get("build_config", {})
    beam_width = int(limits.get("max_beam_width") or 1)
    has_alibi = "alibi" in str(engine.config.get("pretrained_config", {}).get("position_embedding_type", ""))
    has_paged_context = limits.get("plugin_config", {}).get("use_paged_context_fmha", True)
    may_begin_cached = "true" if has_paged_context and not has_alibi else "false"  # as in engine.tensorrt_llm.open
    return {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": str(engine_path),
        "executor_worker_path": WORKER,
        "num_nodes": "1",
        "max_beam_width": str(beam_width),
        "decoding_mode": "top_k_top_p" if beam_width == 1 else "beam_search",
        "batch_scheduler_policy": SchedulerSettings().policy.value,
        "enable_chunked_context": may_begin_cached,
        "kv_cache_free_gpu_mem_fraction": "0.9",
        "cross_kv_cache_fraction": "0.5",
        "kv_cache_host_memory_bytes": "0",
        "kv_cache_onboard_blocks": "true",
        "enable_kv_cache_reuse": may_begin_cached,
        "exclude_input_in_output": "true",
        "normalize_log_probs": "true",
        "cancellation_check_period_ms": "100",
        "stats_check_period_ms": "100",
        "recv_poll_period_ms": "0",
        "iter_stats_max_iterations": "1000",
        "request_stats_max_iterations": "0",
        "lora_cache_optimal_adapter_size": "8",
        "lora_cache_max_adapter_size": "64",
        "lora_cache_gpu_memory_fraction": "0.05",
        "lora_cache_host_memory_bytes": "1073741824",
        "gpu_weights_percent": "1.0",
        "multi_block_mode": "true",
        "enable_context_fmha_fp32_acc": "false",
        "cuda_graph_mode": "false",
        "cuda_graph_cache_size": "0",
        "speculative_decoding_fast_logits": "false",
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
    }


def ensemble_of_contract(config: ModelConfig) -> ModelConfig:
    """The packaged `ensemble` without the tensors that the compiled backend does not have."""
    made = ModelConfig()
    made.CopyFrom(config)
    for step in made.ensemble_scheduling.step:
        if step.model_name == ENGINE_MODEL:
            _drop(step.input_map, FOREIGN_INPUTS)
            _drop(step.output_map, FOREIGN_OUTPUTS)
    made_by_steps = {tensor for step in made.ensemble_scheduling.step for tensor in step.output_map.values()}
    known = made_by_steps | {tensor.name for tensor in made.input}
    for step in made.ensemble_scheduling.step:
        _drop(step.input_map, [key for key, tensor in step.input_map.items() if tensor not in known])
    used = {tensor for step in made.ensemble_scheduling.step for tensor in step.input_map.values()}
    read = used | {tensor.name for tensor in config.output}
    for step in made.ensemble_scheduling.step:
        _drop(step.output_map, [key for key, tensor in step.output_map.items() if tensor not in read])
    _keep(made.input, (tensor for tensor in config.input if tensor.name in used))
    _keep(made.output, (tensor for tensor in config.output if tensor.name in made_by_steps))
    return made


def _keep(field: Any, messages: Iterable[Any]) -> None:
    kept = list(messages)
    del field[:]
    field.extend(kept)


def _drop(mapping: Any, keys: Collection[str]) -> None:
    for key in keys:
        if key in mapping:
            del mapping[key]
