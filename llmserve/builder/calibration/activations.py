"""Measures the inputs of matrices while the reference reads a text."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.calibration.feedback import (
    BLOCK_INPUTS,
    DAMPING,
    DAMPING_OF_FEW,
    Moments,
    Shares,
    shares_of,
)
from llmserve.builder.pieces import Each, Weight, one_by_one
from llmserve.builder.quantization import Matrix
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.errors import Unsupported
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.number_formats import ROUNDED

SUMMED_TOKENS = 2048  # in float32; larger sums are in float64
EXPERT_BLOCK_INPUTS = (BLOCK_INPUTS, 128, 64)  # feedback within smaller blocks gains less
MOST_EXPERT_BYTES = 2 << 30  # for the shares of all experts: Qwen3-30B-A3B has blocks of 128 inputs

logger = logging.getLogger(__name__)

Load: TypeAlias = Callable[[str], Weight]
Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Statistics of a matrix's inputs: the largest value of each, and the sums of products of pairs within blocks."""

    peaks: Vector  # [K]
    moments: Moments

    def divided(self, factors: NDArray[np.float32]) -> Inputs:
        """The statistics after the inputs are divided by powers of two [K]; exact."""
        num_blocks, width, _ = self.moments.shape
        inverse = np.zeros(num_blocks * width, np.float32)
        inverse[: len(factors)] = 1 / factors
        of_blocks = inverse.reshape(num_blocks, width)
        return Inputs(self.peaks / factors, self.moments * of_blocks[:, :, None] * of_blocks[:, None, :])


@dataclass(frozen=True, slots=True)
class Watched:
    """Statistics by matrix; matrices that read the same values share them."""

    inputs: Mapping[str, Inputs]
    of_experts: Mapping[str, Shares]  # of experts' second matrices, per expert


def watch_inputs(
    program: Program,
    texts: Sequence[Sequence[int]],
    load: Load,
    *,
    advance: Callable[[str, int], None],
    each: Each = one_by_one,
    rounded: Collection[str] = (),
) -> Watched:
    """`advance` receives names and numbers of elements. `rounded`: matrices that are rounded with feedback.

    Experts' first matrices are one tensor. Each row is read by the same number of experts, so their inputs together are
    the layer's inputs. Inputs of second matrices differ from expert to expert, so each has its own statistics.
    """
    watch = _Watch(each, _of_experts(program, load, rounded))
    ReferenceModel(program, load, each=each, advance=advance).watch([Run(ids) for ids in texts], watch)
    return Watched(watch.inputs, watch.of_experts)


class _Watch:
    """See `Observer`."""

    def __init__(self, each: Each, of_experts: Mapping[str, Shares]) -> None:
        self.inputs: dict[str, Inputs] = {}
        self.of_experts = of_experts  # zeros for experts that no token chooses
        self._each = each
        self._value = ""  # the value whose inputs are known

    def layer(self, op: Op, x: Matrix) -> None:
        is_scaled = op.kind is OpKind.EXPERTS and op.number("scales_inputs")
        value = op.output if is_scaled else op.inputs[0]
        if value != self._value:
            moments = _moments(op.weights[0], x, block_width(x.shape[1]), self._each)
            self._known = Inputs(np.abs(x).max(axis=0).astype(np.float64), moments)
            self._value = value
        self.inputs[op.weights[0]] = self._known

    def second(self, op: Op, expert: int, x: Matrix) -> None:
        name = op.weights[1]
        if name in self.of_experts:
            shares = self.of_experts[name][expert]
            width = shares.shape[1]
            damping = max(DAMPING, DAMPING_OF_FEW * width / len(x))
            shares[:] = shares_of(_moments(name, x, width, one_by_one), damping)


def _of_experts(program: Program, load: Load, rounded: Collection[str]) -> Mapping[str, Shares]:
    """Memory for the shares of experts' second matrices, in blocks so narrow that all of them fit; or none."""
    experts = {op.weights[1]: int(op.number("num_experts")) for op in program.ops if op.kind is OpKind.EXPERTS}
    inputs = {name: (count, load(name).shape[1]) for name, count in experts.items() if name in rounded}

    def shape(count: int, num_inputs: int, most: int) -> tuple[int, int, int, int]:
        width = min(most, block_width(num_inputs))
        return count, -(-num_inputs // width), width, width

    for most in EXPERT_BLOCK_INPUTS:
        shapes = {name: shape(*each, most) for name, each in inputs.items()}
        if sum(map(math.prod, shapes.values())) * np.dtype(np.float16).itemsize <= MOST_EXPERT_BYTES:
            return {name: np.zeros(each, np.float16) for name, each in shapes.items()}
    logger.warning(
        "calibration: experts' down matrices are rounded without feedback: it would need more than %.0f GiB of memory",
        MOST_EXPERT_BYTES / 2**30,
    )
    return {}


def watched_names(program: Program) -> list[str]:
    """The parameters that `watch_inputs` reads."""
    return [name for op in program.ops if op.kind is not OpKind.LOGITS for name in op.weights]


def _moments(name: str, x: Matrix, width: int, each: Each) -> Moments:
    def of_block(begin: int) -> NDArray[np.float32]:
        total = np.zeros((width, width))
        for first in range(0, len(x), SUMMED_TOKENS):
            part = x[first : first + SUMMED_TOKENS, begin : begin + width]
            total[: part.shape[1], : part.shape[1]] += part.T @ part
        return total.astype(np.float32)

    moments = np.stack(list(each(of_block, range(0, x.shape[1], width))))
    if not np.isfinite(moments).all():
        raise Unsupported(f"{name}: with this calibration data, the squares of its inputs overflow float32")
    return moments


def block_width(num_inputs: int) -> int:
    """The width of as few blocks as are needed; zeros fill up the last one."""
    return min(BLOCK_INPUTS, max(format.num_groups(num_inputs) * format.group for format in ROUNDED.values()))
