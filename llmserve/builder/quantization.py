"""How weights and activations are rounded to few bits, and which parameters are. The same for every target.

Thirty-two inputs of an output share a scale, and thirty-two inputs of a token, whose activations are rounded to int8
whatever the bits of the weights. Everything is symmetric, and nothing is calibrated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.models.graph import OpKind, Program
from llmserve.models.spec import Param

LINEAR_KINDS = (OpKind.LINEAR, OpKind.LOGITS)
QUANTIZED_GROUP = 32  # inputs that share a scale
ROUNDED_ROWS = 256  # at a time, to keep temporaries small

Matrix: TypeAlias = NDArray[np.float32]
Groups: TypeAlias = NDArray[np.float32]  # [N, groups, QUANTIZED_GROUP]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [N, K] is approximately `values * group_scale * row_scale`, each group scale for its inputs."""

    values: NDArray[np.int8]  # [N, K]
    group_scale: NDArray[np.float16]  # [N, groups], relative to the row's largest: at most 1
    row_scale: NDArray[np.float32]  # [N]


class Scheme(Protocol):
    """A number format of weights."""

    @property
    def name(self) -> str: ...

    def quantize(self, rows: Matrix) -> Quantized:
        """`rows` [N, K] in this format."""


@dataclass(frozen=True, slots=True)
class Int8:
    """Values from -127 to 127: the largest of a group becomes 127."""

    name: str = "int8"

    def quantize(self, rows: Matrix) -> Quantized:
        groups = in_groups(rows)
        return _quantize(rows, groups, np.abs(groups).max(axis=2) / np.float32(127), lowest=-127, highest=127)


@dataclass(frozen=True, slots=True)
class Int4:
    """Values from -8 to 7: the largest of a group, with its sign, becomes -8."""

    name: str = "int4"

    def quantize(self, rows: Matrix) -> Quantized:
        groups = in_groups(rows)
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
        return _quantize(rows, groups, largest / np.float32(-8), lowest=-8, highest=7)


def _quantize(rows: Matrix, groups: Groups, scale: Matrix, *, lowest: int, highest: int) -> Quantized:
    """Values are chosen for the scales as they are stored."""
    row_scale = np.abs(scale).max(axis=1)
    group_scale = (scale / np.where(row_scale > 0, row_scale, np.float32(1))[:, None]).astype(np.float16)
    stored = group_scale.astype(np.float32) * row_scale[:, None]
    safe = np.where(stored == 0, np.float32(1), stored)
    values = np.clip(np.rint(groups / safe[:, :, None]), lowest, highest).astype(np.int8)
    return Quantized(values.reshape(len(rows), -1)[:, : rows.shape[1]], group_scale, row_scale)


def in_groups(rows: Matrix) -> Groups:
    """[N, K] as [N, groups, QUANTIZED_GROUP], filled up with zeros."""
    count, cols = rows.shape
    num_groups = -(-cols // QUANTIZED_GROUP)
    if cols == num_groups * QUANTIZED_GROUP:
        return rows.reshape(count, num_groups, QUANTIZED_GROUP)
    padded = np.zeros((count, num_groups * QUANTIZED_GROUP), np.float32)
    padded[:, :cols] = rows
    return padded.reshape(count, num_groups, QUANTIZED_GROUP)


def round_weight(scheme: Scheme, matrix: Matrix) -> Matrix:
    """The values that `matrix` has after quantization; a few rows at a time: one copy of it and little more."""
    result = np.empty_like(matrix)
    for start in range(0, len(matrix), ROUNDED_ROWS):
        rows = slice(start, start + ROUNDED_ROWS)
        found = scheme.quantize(matrix[rows])
        scale = found.group_scale.astype(np.float32) * found.row_scale[:, None]
        result[rows] = found.values * np.repeat(scale, QUANTIZED_GROUP, axis=1)[:, : matrix.shape[1]]
    return result


def round_activations(x: Matrix) -> Matrix:
    """As an engine rounds them before a quantized linear layer."""
    groups = in_groups(x)
    return round_to_int8(groups).reshape(len(x), -1)[:, : x.shape[1]]


def round_to_int8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Symmetric, with one scale for the numbers along the last axis."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    rounded: NDArray[np.float32] = np.rint(x / np.where(scale > 0, scale, np.float32(1))) * scale
    return rounded


def quantized_params(program: Program, params: Sequence[Param], options: BuildOptions) -> Mapping[str, Scheme]:
    """Parameters that are quantized: quantizable ones that only linear layers read, as their matrix.

    With int4 the head stays int8: logits are compared with each other, and it is a small part of a model.
    """
    if not options.quantization:
        return {}
    wanted = {param.name for param in params if param.quantizable}
    matrices = {op.weights[0]: op.kind for op in program.ops if op.kind in LINEAR_KINDS}
    elsewhere = {name for op in program.ops for name in (op.weights[1:] if op.kind in LINEAR_KINDS else op.weights)}
    layers: Scheme = Int4() if options.quantization == "int4" else Int8()
    return {
        name: Int8() if kind is OpKind.LOGITS else layers
        for name, kind in matrices.items()
        if name in wanted and name not in elsewhere
    }


def stored_names(params: Sequence[Param], quantized: Collection[str]) -> Mapping[str, str]:
    """Parameter -> the name under which its numbers are stored.

    Parameters made from the same sources in the same way (a head tied to the embedding) are stored once, under the
    first one's name; a quantized one has numbers of its own.
    """
    first: dict[object, str] = {}
    origins: dict[str, Any] = {
        param.name: param.name if param.name in quantized else (param.sources, param.combine) for param in params
    }
    return {name: first.setdefault(origin, name) for name, origin in origins.items()}
