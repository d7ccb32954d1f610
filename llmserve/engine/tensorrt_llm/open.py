"""Opens a running engine from a directory of the tensorrt_llm target and an operator's settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from llmserve.engine.base import Engine, EngineInfo
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.engine.tensorrt_llm import library
from llmserve.engine.tensorrt_llm.executor import ExecutorEngine, ExecutorLimits
from llmserve.engine.tensorrt_llm.fits import CANONICAL_FOLDER, LLM_ARGUMENTS_FILE, fit_problems, mode_of
from llmserve.engine.tensorrt_llm.library import Mode
from llmserve.engine.tensorrt_llm.llm import LlmEngine
from llmserve.engine.tensorrt_llm.sampling import OF_SOME_RELEASES
from llmserve.engine.tensorrt_llm.settings import HONOURED
from llmserve.engine.tensorrt_llm.signatures import signatures
from llmserve.errors import EngineFileError, InternalError, raise_problems
from llmserve.models.registry import architecture_for
from llmserve.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

WORKER = ("bin", "executorWorker")  # of the package
KV_CACHE_SETTINGS = {  # an operator's -> of KvCacheConfig
    "sink_token_length": "sink_token_length",
    "kv_cache_host_memory_bytes": "host_cache_size",
    "kv_cache_onboard_blocks": "onboard_blocks",
}


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known before anything is started."""

    directory: EngineDirectory
    info: EngineInfo
    spec: DecoderSpec
    settings: EngineSettings

    @property
    def gpu(self) -> GpuSettings:
        return self.settings.gpu

    @property
    def world_size(self) -> int:
        return int(self.directory.manifest.device["world_size"])

    @property
    def tokens_per_block(self) -> int:
        return int(self.directory.manifest.options["tokens_per_block"])

    @property
    def has_paged_context_fmha(self) -> bool:
        """As set by TensorRT-LLM's builder; without it, the executor disables chunks and shared blocks."""
        plugins = self.directory.config["build_config"].get("plugin_config", {})
        return bool(plugins.get("use_paged_context_fmha", True))

    @property
    def why_prompts_start_anew(self) -> str:
        """Why prompts cannot start with cached blocks; empty if they can."""
        if self.spec.rope is None:
            return "TensorRT-LLM's ALiBi is not verified for prompts with a cached beginning"
        return "" if self.has_paged_context_fmha else "the engine was built with --context-fmha disable"

    @property
    def chunked_context(self) -> bool:
        """Whether prompts may be longer than a step."""
        given = self.gpu.enable_chunked_context
        return not self.why_prompts_start_anew if given is None else given

    @property
    def block_reuse(self) -> bool:
        given = self.settings.scheduler.enable_block_reuse
        return not self.why_prompts_start_anew if given is None else given

    @property
    def attention_window(self) -> list[int] | None:
        """Per layer: the network's own window, unless the operator sets another one."""
        if self.gpu.max_attention_window_size:
            return list(self.gpu.max_attention_window_size)
        windows = [window or self.info.max_seq_len for window in self.spec.windows]
        return windows or None

    @property
    def beam_width(self) -> int:
        return self.info.max_beam_width if self.gpu.max_beam_width is None else self.gpu.max_beam_width

    @property
    def worker(self) -> Path:
        """The program that orchestrator mode starts for each rank."""
        return Path(self.gpu.executor_worker_path or library.installed().folder.joinpath(*WORKER))

    def problems(self) -> list[str]:
        """Settings that are incompatible with this engine."""
        found, given = [], len(self.gpu.gpu_device_ids)
        if self.beam_width > self.info.max_beam_width:
            found.append(
                f"max_beam_width is {self.beam_width}, the engine was built for {self.info.max_beam_width}; rebuild it "
                f"with --max-beam-width {self.beam_width}"
            )
        asked = {
            "enable_chunked_context": self.gpu.enable_chunked_context,
            "enable_kv_cache_reuse": self.settings.scheduler.enable_block_reuse,
        }
        if reason := self.why_prompts_start_anew:
            found += [f"{name} cannot be true: {reason}; leave it out" for name, value in asked.items() if value]
        if mode_of(self.directory) is Mode.LLM:  # the library places and starts the ranks itself
            return found
        if self.gpu.kv_cache_onboard_blocks is False and self.has_paged_context_fmha:
            found.append(
                "kv_cache_onboard_blocks cannot be false: context FMHA reads the cache on the GPU; leave it out, or "
                "build with --context-fmha disable"
            )
        if given and given != self.world_size:
            found.append(f"gpu_device_ids names {given} GPUs, but the engine needs {self.world_size}")
        if self.world_size > 1 and not self.worker.is_file():
            found.append(
                f"the ranks' program {self.worker} is missing; give TensorRT-LLM's executorWorker with the parameter "
                "executor_worker_path"
            )
        return found


def open_tensorrt_llm(directory: EngineDirectory, settings: EngineSettings) -> Engine:
    """Start the library's own batcher. `EngineFileError` lists everything that prevents the engine from running."""
    raise_problems(EngineFileError, f"{directory.path} cannot run on this machine", fit_problems(directory))
    mode = mode_of(directory)
    if settings.threads:
        logger.warning("num_threads = %d has no effect on this engine", settings.threads)
    for text in settings.gpu.without_effect(HONOURED[mode], {}):
        logger.warning("%s", text)
    spec = architecture_for(directory.hf_config).from_hf(directory.hf_config)
    opening = Opening(directory, directory.info(), spec, settings)
    raise_problems(EngineFileError, f"{directory.path} cannot be opened with these settings", opening.problems())
    opening = replace(opening, info=replace(opening.info, max_beam_width=opening.beam_width))
    logger.info("opening %s with %s", directory.path, library.installed())
    try:
        return _executor_engine(opening) if mode is Mode.ENGINE else _llm_engine(opening)
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        raise InternalError(f"TensorRT-LLM could not open {directory.path}: {error}") from error


def _executor_engine(opening: Opening) -> ExecutorEngine:
    names = library.executor()
    executor = names.Executor(
        model_path=opening.directory.path,
        model_type=names.ModelType.DECODER_ONLY,
        executor_config=names.ExecutorConfig(**_executor_arguments(names, opening)),
    )
    limits = opening.directory.config["build_config"]
    longest = (
        limits["max_input_len"] if opening.chunked_context else min(limits["max_input_len"], limits["max_num_tokens"])
    )
    return ExecutorEngine(
        executor,
        names,
        opening.info,
        ExecutorLimits(longest, opening.settings.scheduler.max_queue_size, opening.tokens_per_block),
    )


def _executor_arguments(names: ModuleType, opening: Opening) -> dict[str, Any]:
    gpu = opening.gpu
    policy = getattr(names.CapacitySchedulerPolicy, opening.settings.scheduler.policy.name)
    arguments = {
        "max_beam_width": opening.beam_width,
        "scheduler_config": names.SchedulerConfig(capacity_scheduler_policy=policy),
        "kv_cache_config": names.KvCacheConfig(**_kv_cache_arguments(opening)),
        "enable_chunked_context": opening.chunked_context,
        "parallel_config": _parallel_config(names, opening),
        **_given(
            gpu, {name: name for name in ("normalize_log_probs", "gpu_weights_percent", "iter_stats_max_iterations")}
        ),
    }
    knobs = ("multi_block_mode", "enable_context_fmha_fp32_acc", "cuda_graph_mode", "cuda_graph_cache_size")
    if turned := _given(gpu, {name: name for name in knobs}):
        arguments["extended_runtime_perf_knob_config"] = names.ExtendedRuntimePerfKnobConfig(**turned)
    return arguments


def _kv_cache_arguments(opening: Opening) -> dict[str, Any]:
    """Arguments of KvCacheConfig, in either mode."""
    return {
        "enable_block_reuse": opening.block_reuse,
        "free_gpu_memory_fraction": opening.settings.kv_cache_fraction,
        "max_tokens": opening.settings.max_kv_tokens or None,
        "max_attention_window": opening.attention_window,
        **_given(opening.gpu, KV_CACHE_SETTINGS),
    }


def _given(gpu: GpuSettings, names: Mapping[str, str]) -> dict[str, Any]:
    """Settings among `names` (ours -> the library's) that the operator has set."""
    given = gpu.given()
    return {theirs: given[ours] for ours, theirs in names.items() if ours in given}


def _parallel_config(names: ModuleType, opening: Opening) -> Any:
    """With several ranks, this process is the orchestrator that starts them, so the server is one process."""
    devices = list(opening.gpu.gpu_device_ids) or None
    if opening.world_size == 1:
        return None if devices is None else names.ParallelConfig(device_ids=devices)
    return names.ParallelConfig(
        communication_type=names.CommunicationType.MPI,
        communication_mode=names.CommunicationMode.ORCHESTRATOR,
        device_ids=devices,
        orchestrator_config=names.OrchestratorConfig(is_orchestrator=True, worker_executable_path=str(opening.worker)),
    )


def _known(kind: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Without settings in KV_CACHE_SETTINGS that this release has removed, such as onboard_blocks, as far as known."""
    told = signatures(kind)
    fields = {field.name for overload in told for field in overload}
    gone = {ours: theirs for ours, theirs in KV_CACHE_SETTINGS.items() if told and theirs not in fields}
    for ours, theirs in gone.items():
        if theirs in arguments:
            logger.warning("parameter %s has no effect on this engine: its release has no %s", ours, theirs)
    return {name: value for name, value in arguments.items() if name not in gone.values()}


def _llm_engine(opening: Opening) -> LlmEngine:
    names = library.llm()
    cache = {**_kv_cache_arguments(opening), "tokens_per_block": opening.tokens_per_block}
    arguments = json.loads((opening.directory.path / LLM_ARGUMENTS_FILE).read_text())
    policy = getattr(names.capacity_scheduler_policy, opening.settings.scheduler.policy.name)
    llm = names.llm(
        model=str(opening.directory.path / CANONICAL_FOLDER),
        skip_tokenizer_init=True,
        **{**arguments, "max_beam_width": opening.beam_width},
        kv_cache_config=names.kv_cache_config(**_known(names.kv_cache_config, cache)),
        scheduler_config=names.scheduler_config(capacity_scheduler_policy=policy),
        enable_chunked_prefill=opening.chunked_context,
        enable_iter_perf_stats=True,
        **_given(opening.gpu, {"iter_stats_max_iterations": "iter_stats_max_iterations"}),
    )
    return LlmEngine(
        llm,
        names,
        opening.info,
        max_queue_size=opening.settings.scheduler.max_queue_size,
        tokens_per_block=opening.tokens_per_block,
        applied=library.applied_parameters(library.installed().folder, OF_SOME_RELEASES),
    )
