"""How weights and activations are rounded to few bits, and which parameters are. The same for every target.

An int8 weight has one scale per output channel; an int4 weight one per group of inputs and output channel. Activations
that meet either are rounded to int8 with one scale per token. Everything is symmetric, and nothing is calibrated.
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
ROUNDED_ROWS = 256  # at a time, to keep temporaries small

Matrix: TypeAlias = NDArray[np.float32]


class Scheme(Protocol):
    """A number format of weights."""

    @property
    def name(self) -> str: ...

    def round(self, rows: Matrix) -> Matrix:
        """The values that `rows` [N, K] have after quantization."""


@dataclass(frozen=True, slots=True)
class Int8:
    name: str = "int8"

    def quantize(self, rows: Matrix) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Values and scale per row: `values * scale` approximates `rows`; the largest of a row becomes 127."""
        scale = np.abs(rows).max(axis=1) / np.float32(127)
        safe = np.where(scale > 0, scale, np.float32(1))
        return np.rint(rows / safe[:, None]).astype(np.int8), scale

    def round(self, rows: Matrix) -> Matrix:
        values, scale = self.quantize(rows)
        rounded: Matrix = values.astype(np.float32) * scale[:, None]
        return rounded


@dataclass(frozen=True, slots=True)
class Int4:
    group_size: int
    name: str = "int4"

    def quantize(self, rows: Matrix) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
        """Values from -8 to 7 [N, K] and scales [N, groups]; the largest of a group, with its sign, becomes -8.

        Scales are float16 and the values are chosen for the scale as it is stored.
        """
        count, cols = rows.shape
        num_groups = -(-cols // self.group_size)
        padded = np.zeros((count, num_groups * self.group_size), np.float32)
        padded[:, :cols] = rows
        groups = padded.reshape(count, num_groups, self.group_size)
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
        scale = (largest / np.float32(-8)).astype(np.float16)
        safe = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
        values = np.clip(np.rint(groups / safe[:, :, None]), -8, 7).astype(np.int8)
        return values.reshape(count, -1)[:, :cols], scale

    def round(self, rows: Matrix) -> Matrix:
        values, scale = self.quantize(rows)
        spread = np.repeat(scale.astype(np.float32), self.group_size, axis=1)[:, : rows.shape[1]]
        rounded: Matrix = values.astype(np.float32) * spread
        return rounded


def round_rows(scheme: Scheme, matrix: Matrix) -> Matrix:
    """`scheme.round`, a few rows at a time: one copy of the matrix and little more."""
    result = np.empty_like(matrix)
    for start in range(0, len(matrix), ROUNDED_ROWS):
        result[start : start + ROUNDED_ROWS] = scheme.round(matrix[start : start + ROUNDED_ROWS])
    return result


def round_activations(x: Matrix) -> Matrix:
    return round_rows(Int8(), x)


def quantized_params(program: Program, params: Sequence[Param], options: BuildOptions) -> Mapping[str, Scheme]:
    """Parameters that are quantized: quantizable ones that only linear layers read, as their matrix.

    With int4 the head stays int8: logits are compared with each other, and it is a small part of a model.
    """
    if not options.quantization:
        return {}
    wanted = {param.name for param in params if param.quantizable}
    matrices = {op.weights[0]: op.kind for op in program.ops if op.kind in LINEAR_KINDS}
    elsewhere = {name for op in program.ops for name in (op.weights[1:] if op.kind in LINEAR_KINDS else op.weights)}
    layers: Scheme = Int4(options.int4_group_size) if options.quantization == "int4" else Int8()
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
