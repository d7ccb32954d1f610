"""The model config's `parameters` -> engine settings. Names and meaning are TensorRT-LLM's.

A parameter without effect on this engine is reported once, at load, and never silently ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmserve.engine.directory.artifact import MANIFEST_FILE
from llmserve.engine.directory.identity import PREFIX
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, ModelConfigError, raise_problems
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import Policy, SchedulerSettings
from llmserve.serving.config.rollout_rules import PARAMETER as RULES
from llmserve.stages.files import resolve_path

logger = logging.getLogger(__name__)
ENGINE_PATH = "gpt_model_path"
OWN_PROCESS = "separate_process"  # whether the engine has one; ours, and not with the prefix of what we tell
ADAPTERS = "adapters"  # directories of LoRA adapters by name, as JSON
ADAPTER_FOLDER = "adapter_folder"  # a folder of adapter directories
GPU = ModelInstanceGroup.KIND_GPU
Value = TypeVar("Value")
Default = TypeVar("Default")

TRUE_WORDS, FALSE_WORDS = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
AS_ASKED: Mapping[str, tuple[str, ...]] = {  # what the engine does anyway
    "FORCE_CPU_ONLY_INPUT_TENSORS": ("no", "yes"),
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching"),
    "batching_strategy": ("inflight_fused_batching", "inflight_batching"),
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "auto"),
}


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """The settings of one `tensorrt_llm` model."""

    engine_dir: Path
    tokenizer_dir: Path
    engine: EngineSettings
    excludes_input: bool  # a request's `exclude_input_in_output` has priority
    own_process: bool = False  # of the engine
    adapters: Mapping[str, Path] = field(default_factory=dict)  # directories by name
    adapter_folder: Path | None = None  # folder of further adapters, named like their directories

    @classmethod
    def read(cls, config: ModelConfig, model_dir: Path, version_dir: Path | None = None) -> ModelParameters:
        """Raise `ModelConfigError` listing every unusable value; warn about every one without effect.

        Without `gpt_model_path`, the version's directory may be the engine directory.
        """
        given = {
            key: entry.string_value.strip()
            for key, entry in config.parameters.items()
            if key != RULES and not key.startswith(PREFIX)  # reported by llmserve
        }
        reader = _ParameterReader({key: value for key, value in given.items() if value and not value.startswith("${")})
        own = str(version_dir) if version_dir is not None and (version_dir / MANIFEST_FILE).is_file() else ""
        engine_dir = reader.take(ENGINE_PATH, own, str)
        if not engine_dir:
            reader.problems.append(
                "gpt_model_path is not set; give the path of an engine directory, or make the version's directory one"
            )
        queue_size = config.dynamic_batching.default_queue_policy.max_queue_size or SchedulerSettings().max_queue_size
        scheduler = reader.made(
            lambda: SchedulerSettings(
                policy=reader.take("batch_scheduler_policy", Policy.GUARANTEED_NO_EVICT, _policy),
                enable_block_reuse=reader.take("enable_kv_cache_reuse", None, _bool),
                max_queue_size=reader.take("max_queue_size", queue_size, int),
                speculation=reader.take("speculation", SchedulerSettings().speculation, Speculation.read),
            ),
            SchedulerSettings(),
        )
        engine = reader.made(
            lambda: EngineSettings(
                threads=reader.take("num_threads", 0, int),
                kv_cache_fraction=reader.take("kv_cache_free_gpu_mem_fraction", 0.9, float),
                max_kv_tokens=reader.take("max_tokens_in_paged_kv_cache", 0, int),
                scheduler=scheduler,
                max_adapters=reader.take("max_adapters", EngineSettings().max_adapters, int),
                adapter_memory=reader.take("adapter_memory", EngineSettings().adapter_memory, int),
                gpu=_gpu_settings(reader, config, model_dir),
            ),
            EngineSettings(),
        )
        folder = reader.take(ADAPTER_FOLDER, "", str)
        given_adapters: Mapping[str, str] = reader.take(ADAPTERS, {}, _paths)
        tokenizer_dir = reader.take("tokenizer_dir", engine_dir, str)
        excludes_input = reader.take("exclude_input_in_output", False, _bool)
        own_process = reader.take(OWN_PROCESS, False, _bool)
        raise_problems(ModelConfigError, f"parameters of model '{config.name}'", reader.problems)
        for text in [*reader.without_effect(), *_placeholders(given)]:
            logger.warning("model '%s': %s", config.name, text)
        engine_path, tokenizer_path = resolve_path(engine_dir, model_dir), resolve_path(tokenizer_dir, model_dir)
        adapters = {name: resolve_path(path, model_dir) for name, path in given_adapters.items()}
        adapter_folder = resolve_path(folder, model_dir) if folder else None
        return cls(engine_path, tokenizer_path, engine, excludes_input, own_process, adapters, adapter_folder)


def _gpu_settings(reader: _ParameterReader, config: ModelConfig, model_dir: Path) -> GpuSettings:
    """Whether the engine supports them is known, and reported, when it is opened."""
    return GpuSettings(
        max_beam_width=reader.take("max_beam_width", None, int),
        enable_chunked_context=reader.take("enable_chunked_context", None, _bool),
        max_attention_window_size=reader.take("max_attention_window_size", (), _integers),
        sink_token_length=reader.take("sink_token_length", None, int),
        kv_cache_host_memory_bytes=reader.take("kv_cache_host_memory_bytes", None, int),
        kv_cache_onboard_blocks=reader.take("kv_cache_onboard_blocks", None, _bool),
        iter_stats_max_iterations=reader.take("iter_stats_max_iterations", None, int),
        gpu_device_ids=reader.take("gpu_device_ids", (), _integers),
        executor_worker_path=reader.take("executor_worker_path", "", str),
        normalize_log_probs=reader.take("normalize_log_probs", None, _bool),
        multi_block_mode=reader.take("multi_block_mode", None, _bool),
        enable_context_fmha_fp32_acc=reader.take("enable_context_fmha_fp32_acc", None, _bool),
        cuda_graph_mode=reader.take("cuda_graph_mode", None, _bool),
        cuda_graph_cache_size=reader.take("cuda_graph_cache_size", None, int),
        gpu_weights_percent=reader.take("gpu_weights_percent", None, float),
        kv_cache_dir=reader.take("kv_cache_dir", "", str),
        kv_cache_disk_size=reader.take("kv_cache_disk_size", None, int),
        draft_engine=reader.take("draft_engine", "", lambda path: str(resolve_path(path, model_dir))),
        instance_gpus=tuple(gpu for group in config.instance_group if group.kind == GPU for gpu in group.gpus),
    )


class _ParameterReader:
    """Removes parameters one by one; those that remain have no effect."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._left = dict(given)
        self.problems: list[str] = []

    def take(self, key: str, default: Default, parse: Callable[[str], Value]) -> Value | Default:
        text = self._left.pop(key, None)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"{key} is {text!r}: {EXPECTED.get(parse, error)}")
            return default

    def made(self, make: Callable[[], Value], default: Value) -> Value:
        """`make()`, or `default` and a problem if the values are not compatible."""
        try:
            return make()
        except InvalidArgument as error:
            self.problems.append(str(error))
            return default

    def without_effect(self) -> list[str]:
        return [
            f"parameter {key} = {value} has no effect on this engine"
            for key, value in sorted(self._left.items())
            if value.lower() not in AS_ASKED.get(key, ())
        ]


def _bool(text: str) -> bool:
    if text.lower() not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError("expected true or false")
    return text.lower() in TRUE_WORDS


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _paths(text: str) -> dict[str, str]:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(path, str) for path in found.values()):
        raise ValueError
    return found


def _policy(text: str) -> Policy:
    if text == "guaranteed_completion":  # its name in the first releases
        return Policy.GUARANTEED_NO_EVICT
    names = [policy.value for policy in Policy]
    if text not in names:
        raise ValueError(f"expected {' or '.join(names)}")
    return Policy(text)


# Python's own messages do not help users
EXPECTED: dict[object, str] = {
    int: "expected an integer",
    float: "expected a number",
    _paths: 'expected directories by name, as JSON: {"NAME": "DIRECTORY"}',
    _integers: "expected whole numbers separated by commas",
}


def _placeholders(given: Mapping[str, str]) -> list[str]:
    """Values that were never filled in when the config was created from a template."""
    names = ", ".join(name for name, value in sorted(given.items()) if value.startswith("${"))
    return [f"unfilled placeholders, ignored: {names}"] if names else []
