"""The classification extension: an output's largest values as `value:index[:label]` strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.raw_tensors import object_array
from llmserve.serving.types import Tensor

UNSORTABLE = ("BYTES", "BOOL", "FP16", "BF16")


def classified(tensor: Tensor, num_classes: int, labels: Sequence[str], *, batched: bool) -> Tensor:
    """The top `num_classes` elements of each batch entry, BYTES of shape [batch, k] or [k]. NaN comes last."""
    if tensor.datatype in UNSORTABLE:
        raise InvalidArgument(
            f"class result not available for output '{tensor.name}' due to unsupported type '{tensor.datatype}'"
        )
    batch_size = tensor.shape[0] if batched and tensor.shape else 1
    rows = tensor.data.reshape(batch_size, tensor.data.size // max(1, batch_size))
    # a stable ascending sort of the reversed row, read backwards: of equal values, the lowest index comes first
    size = rows.shape[1]
    order = size - 1 - np.argsort(_sortable(rows)[:, ::-1], axis=1, kind="stable")[:, ::-1]
    top = order[:, : min(num_classes, size)]
    texts = [_class_text(row[index], int(index), labels) for row, top in zip(rows, top, strict=True) for index in top]
    shape = top.shape if batched else top.shape[1:]
    return Tensor(tensor.name, "BYTES", object_array(texts).reshape(shape))


def _sortable(values: NDArray[Any]) -> NDArray[Any]:
    return np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values


def _class_text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:.6f}" if value.dtype.kind == "f" else str(value)
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()
