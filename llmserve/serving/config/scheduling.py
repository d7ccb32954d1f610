"""Checks a config's settings for ragged batches, the response cache, warm-up and sequences."""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import BatchOutput, DataType, ModelConfig

from llmserve.serving.config.sequence_batching import sequence_problems

_BATCH_INPUT_TYPES = (DataType.TYPE_INT32, DataType.TYPE_FP32)


def scheduling_problems(config: ModelConfig) -> list[str]:
    return [
        *_ragged_problems(config),
        *_cache_problems(config),
        *_warmup_problems(config),
        *sequence_problems(config),
    ]


def _cache_problems(config: ModelConfig) -> list[str]:
    if not config.response_cache.enable:
        return []
    problems = []
    if config.model_transaction_policy.decoupled:
        problems.append("response_cache: a decoupled model's responses cannot be cached; remove it")
    if config.HasField("sequence_batching"):
        problems.append("response_cache: the answers of a model with sequences depend on its state; remove it")
    return problems


def _ragged_problems(config: ModelConfig) -> list[str]:
    problems = []
    if config.max_batch_size < 1:
        problems += [
            f"input '{tensor.name}': allow_ragged_batch needs max_batch_size of at least 1"
            for tensor in config.input
            if tensor.allow_ragged_batch
        ]
        problems += [f"{kind} needs max_batch_size of at least 1" for kind in _batch_tensors(config)]
    inputs = {tensor.name: tensor for tensor in config.input}
    for made in config.batch_input:
        label = f"batch_input {_listed(made.target_name)}"
        if not made.target_name:
            problems.append("a batch_input has no target_name")
        if made.data_type not in _BATCH_INPUT_TYPES:
            problems.append(f"{label}: data_type must be TYPE_INT32 or TYPE_FP32")
        problems += [f"{label}: '{name}' is an input of the model, too" for name in made.target_name if name in inputs]
        problems += _source_problems(label, made.source_input, config)
    for split in config.batch_output:
        problems += _scatter_problems(split, config)
    return problems


def _scatter_problems(split: BatchOutput, config: ModelConfig) -> list[str]:
    label = f"batch_output {_listed(split.target_name)}"
    problems = _source_problems(label, split.source_input, config)
    ranks = {tensor.name: len(tensor.dims) for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    if not split.target_name:
        problems.append("a batch_output has no target_name")
    for name in split.target_name:
        if name not in outputs:
            problems.append(f"{label}: '{name}' is not an output of the model")
        elif not problems and len(outputs[name].dims) != ranks[split.source_input[0]]:
            problems.append(f"{label}: '{name}' and input '{split.source_input[0]}' have different numbers of dims")
    return problems


def _source_problems(label: str, sources: Sequence[str], config: ModelConfig) -> list[str]:
    if len(sources) != 1:
        return [f"{label}: source_input must name one input, got {len(sources)}"]
    if sources[0] not in {tensor.name for tensor in config.input}:
        return [f"{label}: source_input '{sources[0]}' is not an input of the model"]
    return []


def _batch_tensors(config: ModelConfig) -> list[str]:
    return ["batch_input"] * bool(config.batch_input) + ["batch_output"] * bool(config.batch_output)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _warmup_problems(config: ModelConfig) -> list[str]:
    """Problems of the declarations. Whether samples fit the model is checked when they are created."""
    problems = []
    for declared in filter(lambda sample: sample.batch_size, config.model_warmup):
        label = f"model_warmup '{declared.name}'"
        if not declared.name:
            problems.append("a model_warmup has no name")
        if declared.batch_size > max(1, config.max_batch_size):
            problems.append(
                f"{label}: batch_size must be in 1 .. {max(1, config.max_batch_size)}, got {declared.batch_size}"
            )
        for name, given in declared.inputs.items():
            if given.data_type == DataType.TYPE_INVALID:
                problems.append(f"{label}: input '{name}' has no data_type")
            if given.WhichOneof("input_data_type") is None:
                problems.append(f"{label}: input '{name}' has none of zero_data, random_data and input_data_file")
            if any(dim < 0 for dim in given.dims):
                problems.append(f"{label}: input '{name}': dims must not be negative, got {list(given.dims)}")
    return problems
