"""Joins the requests of a batch into one set of tensors, and splits the outputs by request.

For backends that execute a batch at once. Ordinary inputs are joined along the batch dimension. Inputs that allow
ragged batches are joined as one row of elements, and `batch_input` says where each request's elements are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import BatchInput, ModelConfig

from llmserve.errors import InternalError
from llmserve.serving.signature import datatype_name, format_shape
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, Tensor

# the value of a batch input, from the shapes (with the batch dimension) of its source in all requests
_Derive: TypeAlias = Callable[[Sequence[tuple[int, ...]]], "NDArray[Any]"]


def _counts(shapes: Sequence[tuple[int, ...]]) -> NDArray[Any]:
    return np.array([int(np.prod(shape)) for shape in shapes])


def _item_shapes(shapes: Sequence[tuple[int, ...]]) -> NDArray[Any]:
    """One row per element of the batch: its shape without the batch dimension."""
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])])


_DERIVE: Mapping[int, _Derive] = {
    BatchInput.BATCH_ELEMENT_COUNT: _counts,
    BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT: lambda shapes: np.cumsum(_counts(shapes)),
    BatchInput.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: lambda shapes: np.cumsum([0, *_counts(shapes)]),
    BatchInput.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE: lambda shapes: np.zeros(
        _counts(shapes).max()
    ),  # only the shape matters
    BatchInput.BATCH_ITEM_SHAPE: _item_shapes,
    BatchInput.BATCH_ITEM_SHAPE_FLATTEN: lambda shapes: _item_shapes(shapes).reshape(-1),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch, as a backend executes it."""

    inputs: Mapping[str, Tensor]
    _collator: Collator
    _requests: Sequence[InferRequest]
    _sizes: Sequence[int]  # rows of each request

    def split(self, outputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The outputs of each request. Raises `InternalError` for a shape that cannot be divided."""
        if not self._collator.batches:
            return [tuple(outputs)]
        parts = [self._collator.divide(tensor, self._requests, self._sizes) for tensor in outputs]
        return [tuple(row) for row in zip(*parts, strict=True)] if parts else [() for _ in self._requests]


class Collator:
    """Joins and splits the batches of a model. Created once per loaded model, from its complete config."""

    def __init__(self, config: ModelConfig) -> None:
        self.batches = config.max_batch_size > 0
        self._name = config.name
        self._ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
        self._derived = tuple(
            (target, datatype_name(declared.data_type), _DERIVE[declared.kind], declared.source_input[0])
            for declared in config.batch_input
            for target in declared.target_name
        )
        self._scattered = {
            target: declared.source_input[0] for declared in config.batch_output for target in declared.target_name
        }
        self._dims = {tensor.name: tuple(tensor.dims) for tensor in config.output}

    def collate(self, requests: Sequence[InferRequest]) -> Batch:
        """Join `requests`, which have the same inputs. Shapes differ only in the batch dimension and ragged inputs."""
        first = requests[0].inputs
        if not self.batches:
            assert len(requests) == 1
            return Batch(first, self, requests, (1,))
        sizes = [next((tensor.shape[0] for tensor in request.inputs.values()), 1) for request in requests]
        inputs = {name: self._join(name, [request.inputs[name] for request in requests]) for name in first}
        for target, datatype, derive, source in self._derived:
            shapes = [request.inputs[source].shape for request in requests if source in request.inputs]
            if shapes:
                inputs[target] = Tensor(target, datatype, derive(shapes).astype(NUMPY_DTYPES[datatype]))
        return Batch(inputs, self, requests, sizes)

    def divide(self, tensor: Tensor, requests: Sequence[InferRequest], sizes: Sequence[int]) -> list[Tensor]:
        """Split one output of a batch into one tensor per request."""
        if tensor.name in self._scattered:
            return self._scatter(tensor, requests)
        if not tensor.shape or tensor.shape[0] != sum(sizes):
            raise InternalError(
                f"model '{self._name}' answered a batch of {sum(sizes)} with output '{tensor.name}' of shape "
                f"{format_shape(tensor.shape)}, which cannot be split among its requests"
            )
        rows = np.split(tensor.data, np.cumsum(sizes)[:-1])
        return [Tensor(tensor.name, tensor.datatype, part) for part in rows]

    def _join(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if name in self._ragged:
            data = np.concatenate([tensor.data.reshape(-1) for tensor in tensors])
        elif len(tensors) == 1:
            return tensors[0]
        else:
            data = np.concatenate([tensor.data for tensor in tensors])
        return Tensor(name, tensors[0].datatype, data)

    def _scatter(self, tensor: Tensor, requests: Sequence[InferRequest]) -> list[Tensor]:
        """Split a row of elements by request. The shape of its source input gives the variable dimensions."""
        source = self._scattered[tensor.name]
        dims = (-1, *self._dims[tensor.name])
        shapes = [
            tuple(have if dim == -1 else dim for dim, have in zip(dims, request.inputs[source].shape, strict=True))
            for request in requests
        ]
        counts = _counts(shapes)
        if tensor.data.size != counts.sum():
            raise InternalError(
                f"model '{self._name}' answered with {tensor.data.size} elements of output '{tensor.name}', but the "
                f"shapes of input '{source}' require {counts.sum()}"
            )
        parts = np.split(tensor.data.reshape(-1), np.cumsum(counts)[:-1])
        return [
            Tensor(tensor.name, tensor.datatype, part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)
        ]
