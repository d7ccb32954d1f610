"""Settings of `config.pbtxt` that this server does not support: refused if answers would differ, else reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelOptimizationPolicy

from llmserve.serving.config.metric_tags import has_unusable_tags


@dataclass(frozen=True, slots=True)
class Feature:
    """A setting that is not supported. `present` returns whether a config uses it."""

    name: str
    present: Callable[[ModelConfig], bool]
    advice: str


REFUSED = (
    Feature(
        "model_operations",
        lambda config: len(config.model_operations.op_library_filename) > 0,
        "custom operator libraries cannot be loaded; remove it",
    ),
    Feature(
        "model_repository_agents",
        lambda config: len(config.model_repository_agents.agents) > 0,
        "agents (checksums, decryption) do not run; remove it",
    ),
)


def _tunes_optimization(config: ModelConfig) -> bool:
    known = ModelOptimizationPolicy()
    known.CopyFrom(config.optimization)
    known.ClearField("input_pinned_memory")
    known.ClearField("output_pinned_memory")
    if config.backend == "onnxruntime":
        known.ClearField("graph")
    return bool(known.ByteSize())


def _any_group(config: ModelConfig, *fields: str) -> bool:
    return any(bool(getattr(group, name)) for group in config.instance_group for name in fields)


def has_gpu() -> bool:
    """Whether NVIDIA's driver is installed; a backend may still be unable to use its GPUs."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


PLACED = ("onnxruntime", "pytorch", "tensorrtllm")  # they read the kind, and refuse or report unsupported ones
IGNORED = (
    Feature("optimization", _tunes_optimization, "graph, accelerator and batching hints have no effect"),
    Feature("cc_model_filenames", lambda config: len(config.cc_model_filenames) > 0, "there is no choice of files"),
    Feature(
        "model_warmup",
        lambda config: any(not sample.batch_size for sample in config.model_warmup),
        "a sample runs only with a batch_size of at least 1",
    ),
    Feature(
        "metric_tags",
        has_unusable_tags,
        "its keys must be letters, digits and _, and not begin with _; others add no label",
    ),
    Feature(
        "instance_group.passive, profile, host_policy, secondary_devices",
        lambda config: _any_group(config, "passive", "profile", "host_policy", "secondary_devices"),
        "instances are all alike",
    ),
    Feature(
        "instance_group.kind",
        lambda config: (
            config.backend not in PLACED
            and any(
                group.kind in (ModelInstanceGroup.KIND_GPU, ModelInstanceGroup.KIND_MODEL)
                for group in config.instance_group
            )
        ),
        "the backend places its instances; for Python models the process's own devices are visible",
    ),
)


def refused_features(config: ModelConfig) -> list[str]:
    return [f"{f.name} is not supported: {f.advice}" for f in REFUSED if f.present(config)]


def ignored_features(config: ModelConfig) -> list[str]:
    return [f"{f.name} has no effect: {f.advice}" for f in IGNORED if f.present(config)]
