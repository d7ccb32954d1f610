"""Prepares `config.pbtxt` for loading: overrides, defaults (as Triton reports them), validation.

Order: parse -> `apply_overrides` -> the backend's `complete_config` -> `fill_defaults` -> `config_problems`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from tritonclient.grpc.model_config_pb2 import (
    DataType,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelQueuePolicy,
)

from llmserve.serving.config.features import has_gpu, refused_features
from llmserve.serving.config.rollout_rules import rollout_problems
from llmserve.serving.config.scheduling import scheduling_problems
from llmserve.serving.config.sequence_batching import fill_sequence_defaults


def is_ensemble(config: ModelConfig) -> bool:
    return bool(config.HasField("ensemble_scheduling") or config.platform == "ensemble")


def apply_overrides(config: ModelConfig, overrides: Mapping[str, str]) -> None:
    """Replace or add string parameters."""
    for key, value in overrides.items():
        config.parameters[key].string_value = value


def drop_repeated_outputs(config: ModelConfig) -> list[str]:
    """Remove outputs that are declared again identically, as in published configs. Returns notes on those removed."""
    kept: list[ModelOutput] = []
    for output in config.output:
        if output not in kept:
            kept.append(output)
    names = Counter(output.name for output in config.output) - Counter(output.name for output in kept)
    if names:
        kept = [ModelOutput.FromString(output.SerializeToString()) for output in kept]
        del config.output[:]
        config.output.extend(kept)
    return [f"output '{name}' is declared more than once, always the same" for name in names]


def fill_defaults(config: ModelConfig) -> None:
    """Fill in Triton's defaults for fields that the config leaves open, so that clients see a complete config."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.version_policy.HasField("latest") and config.version_policy.latest.num_versions == 0:
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.extend(
            [config.max_batch_size] if config.max_batch_size > 0 else []
        )
    if is_ensemble(config):
        config.platform = "ensemble"
        config.model_transaction_policy.SetInParent()
        return
    fill_sequence_defaults(config)
    for memory in (config.optimization.input_pinned_memory, config.optimization.output_pinned_memory):
        memory.enable = True
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        group.count = group.count or 1
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            group.kind = ModelInstanceGroup.KIND_CPU


def instance_names(config: ModelConfig) -> list[str]:
    """One per instance: `<group name>_<index>`."""
    return [f"{group.name}_{index}" for group in config.instance_group for index in range(group.count)]


def config_problems(config: ModelConfig) -> list[str]:
    """All problems of a completed config; empty if it can be loaded."""
    return [
        *refused_features(config),
        *_size_problems(config),
        *_tensor_problems("input", config.input),
        *_tensor_problems("output", config.output),
        *_group_problems(config),
        *_batching_problems(config),
        *scheduling_problems(config),
        *_version_problems(config),
        *rollout_problems(config),
    ]


def _size_problems(config: ModelConfig) -> list[str]:
    problems = []
    if config.max_batch_size < 0:
        problems.append(f"max_batch_size must not be negative, got {config.max_batch_size}")
    if not config.output:
        problems.append("it declares no output")
    return problems


def _tensor_problems(kind: str, tensors: Iterable[ModelInput | ModelOutput]) -> list[str]:
    problems = []
    names = Counter(tensor.name for tensor in tensors)
    problems += [f"{kind} '{name}' is declared {count} times" for name, count in names.items() if count > 1]
    for tensor in tensors:
        label = f"{kind} '{tensor.name}'"
        if not tensor.name:
            problems.append(f"an {kind} has no name")
        if tensor.data_type == DataType.TYPE_INVALID:
            problems.append(f"{label} has no data_type")
        if not tensor.dims and not tensor.HasField("reshape"):
            problems.append(f"{label} has no dims; write dims: [ 1 ] with reshape {{ shape: [ ] }} for a scalar")
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            problems.append(f"{label}: dims must be positive or -1, got {list(tensor.dims)}")
        if tensor.HasField("reshape"):
            problems += _reshape_problems(label, list(tensor.dims), list(tensor.reshape.shape))
    return problems


def _reshape_problems(label: str, dims: list[int], shape: list[int]) -> list[str]:
    """`-1`s correspond in order, and between them the number of elements must be the same."""
    if _segments(dims) == _segments(shape):
        return []
    return [f"{label}: reshape {shape} has not the same number of elements as dims {dims}"]


def _segments(dims: list[int]) -> list[int]:
    """Number of elements between the variable dimensions."""
    segments = [1]
    for dim in dims:
        if dim == -1:
            segments.append(1)
        else:
            segments[-1] *= dim
    return segments


def _group_problems(config: ModelConfig) -> list[str]:
    problems = [
        f"instance_group '{group.name}': count must be at least 1, got {group.count}"
        for group in config.instance_group
        if group.count < 1
    ]
    problems += [  # Triton's message
        f"instance group {group.name} of model {config.name} has kind KIND_GPU but no GPUs are available; use KIND_CPU"
        for group in config.instance_group
        if group.kind == ModelInstanceGroup.KIND_GPU and not has_gpu()
    ]
    names = Counter(group.name for group in config.instance_group)
    return problems + [
        f"instance_group '{name}' is declared {count} times" for name, count in names.items() if count > 1
    ]


def _batching_problems(config: ModelConfig) -> list[str]:
    if not config.HasField("dynamic_batching"):
        return []
    batching = config.dynamic_batching
    problems = []
    if config.max_batch_size < 1:
        problems.append("dynamic_batching needs max_batch_size of at least 1")
    problems += [
        f"dynamic_batching: preferred_batch_size {size} is not in 1 .. max_batch_size ({config.max_batch_size})"
        for size in batching.preferred_batch_size
        if not 1 <= size <= max(1, config.max_batch_size)
    ]
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        problems.append(f"dynamic_batching: default_priority_level must be in 1 .. {levels}, got {default}")
    problems += [
        f"dynamic_batching: priority_queue_policy {level} is not in 1 .. priority_levels ({levels})"
        for level in batching.priority_queue_policy
        if not 1 <= level <= levels
    ]
    if batching.preserve_ordering and levels > 1:  # an answer would wait for that of a request queued behind
        problems.append("dynamic_batching: preserve_ordering takes one priority level only")
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    if batching.preserve_ordering and any(
        policy.timeout_action == ModelQueuePolicy.DELAY and policy.default_timeout_microseconds for policy in policies
    ):
        problems.append("dynamic_batching: timeout_action DELAY contradicts preserve_ordering")
    return problems


def _version_problems(config: ModelConfig) -> list[str]:
    policy = config.version_policy
    if policy.HasField("specific") and not policy.specific.versions:
        return ["version_policy specific lists no versions"]
    return []


def absent_versions(config: ModelConfig, available: Collection[int]) -> list[str]:
    """Messages about versions that the policy names but that have no directory."""
    return [
        f"version {version} of version_policy specific has no directory"
        for version in config.version_policy.specific.versions
        if version not in available
    ]


def served_versions(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """The versions to load, ascending, without those in `specific` that have no directory."""
    versions = sorted(available)
    policy = config.version_policy
    if policy.HasField("all"):
        return versions
    if policy.HasField("specific"):
        return [version for version in versions if version in policy.specific.versions]
    return versions[-policy.latest.num_versions :]
