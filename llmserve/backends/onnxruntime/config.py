"""Compares an ONNX model's own tensors with its `config.pbtxt`: missing values are filled in, others must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from llmserve.backends.functions import input_datatypes
from llmserve.errors import ModelConfigError
from llmserve.serving.config.sequence_batching import implicit_inputs, implicit_outputs
from llmserve.serving.signature import datatype_name, format_shape


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor as declared in the model file: KServe's datatype, and -1 for variable sizes."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def complete_tensors(
    config: ModelConfig, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor], default_max_batch_size: int
) -> None:
    """As in Triton, a model batches if the first dimension of all its tensors is variable."""
    can_batch = all(tensor.shape[:1] == (-1,) for tensor in (*inputs, *outputs))
    if config.max_batch_size and not can_batch:
        raise ModelConfigError(
            f"model '{config.name}': max_batch_size is {config.max_batch_size}, but the first dimension of the model's "
            "tensors is fixed; set max_batch_size: 0"
        )
    if can_batch and not config.max_batch_size:
        config.max_batch_size = default_max_batch_size
    if config.max_batch_size > 1 and not config.HasField("sequence_batching"):
        config.dynamic_batching.SetInParent()
    batch_dims = 1 if config.max_batch_size else 0
    added, kept = implicit_inputs(config), implicit_outputs(config)
    _fill(config.input, [tensor for tensor in inputs if tensor.name not in added], batch_dims)
    _fill(config.output, [tensor for tensor in outputs if tensor.name not in kept], batch_dims)


def _fill(declared: Any, tensors: Sequence[ModelTensor], batch_dims: int) -> None:
    if declared:
        return
    for tensor in tensors:
        dims = tensor.shape[batch_dims:]
        name = "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"
        added = declared.add(name=tensor.name, data_type=DataType.Value(name), dims=dims or (1,))
        if not dims:
            added.reshape.SetInParent()  # a scalar: dims [ 1 ] for the client, but no dimension for the model


def mismatches(config: ModelConfig, inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> list[str]:
    batch_dims = 1 if config.max_batch_size else 0
    given = input_datatypes(config)
    return [
        *_tensor_mismatches("input", config.input, inputs, batch_dims),
        *_tensor_mismatches("output", config.output, outputs, batch_dims),
        *(f"the model's input '{tensor.name}' is not in the config" for tensor in inputs if tensor.name not in given),
    ]


def _tensor_mismatches(kind: str, declared: Any, tensors: Sequence[ModelTensor], batch_dims: int) -> list[str]:
    known = {tensor.name: tensor for tensor in tensors}
    problems = []
    for spec in declared:
        tensor = known.get(spec.name)
        if tensor is None:
            problems.append(f"the model has no {kind} '{spec.name}'; it has: {', '.join(known)}")
            continue
        if tensor.datatype != datatype_name(spec.data_type):
            problems.append(
                f"{kind} '{spec.name}' is {datatype_name(spec.data_type)} in the config but {tensor.datatype} in the "
                "model"
            )
        dims = spec.reshape.shape if spec.HasField("reshape") else spec.dims
        shape = (*(-1,) * batch_dims, *dims)
        if not _compatible(shape, tensor.shape):
            problems.append(
                f"{kind} '{spec.name}' has shape {format_shape(shape)} in the config but {format_shape(tensor.shape)} "
                "in the model"
            )
    return problems


def _compatible(shape: Sequence[int], other: Sequence[int]) -> bool:
    return len(shape) == len(other) and all(
        mine == theirs or -1 in (mine, theirs) for mine, theirs in zip(shape, other, strict=True)
    )
