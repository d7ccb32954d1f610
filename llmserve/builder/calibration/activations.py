"""What the inputs of matrices are like when a network reads a text: the reference path, watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.calibration.feedback import BLOCK_INPUTS, Moments
from llmserve.builder.pieces import Each, Weight, one_by_one
from llmserve.builder.quantization import Matrix
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.errors import Unsupported
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.number_formats import ROUNDED

SUMMED_TOKENS = 2048  # in float32; more are added in float64

Load: TypeAlias = Callable[[str], Weight]
Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a matrix: the largest of each input, and the sums of products of two, within blocks."""

    peaks: Vector  # [K]
    moments: Moments

    def divided(self, factors: NDArray[np.float32]) -> Inputs:
        """As they are once the inputs are divided by powers of two [K]: exact."""
        num_blocks, width, _ = self.moments.shape
        inverse = np.zeros(num_blocks * width, np.float32)
        inverse[: len(factors)] = 1 / factors
        of_blocks = inverse.reshape(num_blocks, width)
        return Inputs(self.peaks / factors, self.moments * of_blocks[:, :, None] * of_blocks[:, None, :])


def watch_inputs(
    program: Program,
    texts: Sequence[Sequence[int]],
    load: Load,
    *,
    advance: Callable[[str, int], None],
    each: Each = one_by_one,
) -> Mapping[str, Inputs]:
    """By matrix; those that read the same have the same. `advance` is told names and numbers of elements.

    Of experts the first matrices, which are one tensor: each row is read by as many, so what all of them read together
    is what the layer reads. What the second ones read has another meaning in each expert.
    """
    found: dict[str, Inputs] = {}
    of_values: dict[str, Inputs] = {}

    def look(op: Op, x: Matrix) -> None:
        is_scaled = op.kind is OpKind.EXPERTS and op.number("scales_inputs")
        value = op.output if is_scaled else op.inputs[0]
        if value not in of_values:
            of_values.clear()
            of_values[value] = _inputs(x, each)
            if not np.isfinite(of_values[value].moments).all():
                raise Unsupported(f"{op.weights[0]}: with the calibration data, squares of its inputs overflow float32")
        found[op.weights[0]] = of_values[value]

    reference = ReferenceModel(program, load, each=each, advance=advance)
    reference.watch([Run(ids) for ids in texts], look)
    return found


def watched_names(program: Program) -> list[str]:
    """The parameters that are read for it."""
    return [name for op in program.ops if op.kind is not OpKind.LOGITS for name in op.weights]


def _inputs(x: Matrix, each: Each) -> Inputs:
    width = block_width(x.shape[1])

    def of_block(begin: int) -> NDArray[np.float32]:
        total = np.zeros((width, width))
        for first in range(0, len(x), SUMMED_TOKENS):
            part = x[first : first + SUMMED_TOKENS, begin : begin + width]
            total[: part.shape[1], : part.shape[1]] += part.T @ part
        return total.astype(np.float32)

    peaks = np.abs(x).max(axis=0).astype(np.float64)
    return Inputs(peaks, np.stack(list(each(of_block, range(0, x.shape[1], width)))))


def block_width(num_inputs: int) -> int:
    """Of as many blocks as are needed, the last one filled up with zeros."""
    return min(BLOCK_INPUTS, max(format.num_groups(num_inputs) * format.group for format in ROUNDED.values()))
