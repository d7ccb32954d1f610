"""Moves powers of two between queries and keys, so that both round better where attention multiplies integers.

A score is the sum of products of the dimensions of a query and a key. Dimensions that are large in keys and small in
queries reduce the precision of the others in their group: Qwen2's biases make some dimensions of keys a hundred times
as large as the rest. The parameters of such a dimension are divided by a power of two for keys, and multiplied by it
for queries: all scores stay the same, bit for bit, if floats have enough range. The two dimensions of a pair in the
rotary embedding share one power. Sizes are estimated from weights and biases alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.equalization import Factors, Load, Vector, powers_of_two, row_lengths
from llmserve.builder.pieces import Each, one_by_one
from llmserve.builder.uses import Uses
from llmserve.models.graph import Op, OpKind, Program

LARGEST_SIZE = 2.0**10  # most that a dimension may grow to: far below float16's limit, as biases are stored in it


@dataclass(frozen=True, slots=True)
class _Maker:
    """The parameters that produce query or key heads: rows of a matrix from `start` on, with their bias, or a norm's
    weight, which all heads share. The first 2 * `num_pairs` dimensions of a head are turned, (i, i + `num_pairs`)."""

    weights: Sequence[str]
    start: int
    num_heads: int  # with their own weights
    num_pairs: int
    inputs: Op | None = None  # the norm whose output the matrix reads

    def sizes(self, load: Load, head_dim: int, each: Each) -> Vector:
        """[num_heads, head_dim]"""
        name, *biases = self.weights
        rows = slice(self.start, self.start + self.num_heads * head_dim)
        weight = load(name)
        if len(weight.shape) == 1:
            squares = np.square(weight[rows].astype(float))
        else:
            squares = np.square(row_lengths(weight, rows, self._input_sizes(load), each))
        for bias in biases:
            squares += np.square(load(bias)[rows].astype(float))
        first, second, others = np.split(squares.reshape(-1, head_dim), (self.num_pairs, 2 * self.num_pairs), axis=1)
        pairs = (first + second) / 2
        sizes: Vector = np.sqrt(np.concatenate((pairs, pairs, others), axis=1))
        return sizes

    def _input_sizes(self, load: Load) -> Vector | np.float64:
        """Sizes of the inputs: after a norm, those of the norm's weight."""
        if self.inputs is None:
            return np.float64(1)
        sizes: Vector = np.abs(load(self.inputs.weights[0])[:].astype(float) + self.inputs.number("offset"))
        return sizes


def equalize_heads(program: Program, load: Load, each: Each = one_by_one) -> Factors:
    """The factors of rows of matrices and elements of vectors; only of those that change."""
    uses = Uses(program)
    found: dict[str, NDArray[np.float32]] = {}

    def multiply(made: _Maker, factors: NDArray[np.float32]) -> None:
        rows = np.repeat(factors, made.num_heads // len(factors), axis=0).reshape(-1)
        for name in made.weights:
            of_weight = found.setdefault(name, np.ones(load(name).shape[0], np.float32))
            of_weight[made.start : made.start + len(rows)] *= rows

    for op in program.ops:
        if op.kind is not OpKind.ATTENTION:
            continue
        head_dim, num_kv_heads = int(op.number("head_dim")), int(op.number("num_kv_heads"))
        queries, keys = (_maker(uses, value, head_dim) for value in op.inputs[:2])
        if queries is None or keys is None or queries.num_pairs != keys.num_pairs:
            continue
        num_free = min(num_kv_heads, queries.num_heads, keys.num_heads)  # heads whose factors are chosen separately
        sizes = [
            np.sqrt(np.square(made.sizes(load, head_dim, each)).reshape(num_free, -1, head_dim).mean(axis=1))
            for made in (queries, keys)
        ]
        factors = np.stack([_factors(*of_head) for of_head in zip(*sizes, strict=True)])
        if (factors != 1).any():
            multiply(queries, factors)
            multiply(keys, np.reciprocal(factors))
    return found


def _factors(queries: Vector, keys: Vector) -> NDArray[np.float32]:
    """Factors for query dimensions of these sizes; keys are divided by them."""
    factors = powers_of_two(keys, queries, least_exponent=1)
    return np.clip(factors, np.minimum(1, 1 / _room(keys)), np.maximum(1, _room(queries)))


def _room(sizes: Vector) -> NDArray[np.float32]:
    return np.exp2(np.floor(np.log2(LARGEST_SIZE / np.maximum(sizes, 1 / LARGEST_SIZE)))).astype(np.float32)


def _maker(uses: Uses, value: str, head_dim: int) -> _Maker | None:
    """Returns None if the parameters also make something else, or if a norm has an offset: no factor is exact then."""
    num_pairs, op = 0, uses.sole(value)
    if op is not None and op.kind is OpKind.ROPE:
        frequencies = op.attrs["inv_freq"]
        assert isinstance(frequencies, tuple)
        num_pairs, value = len(frequencies), op.inputs[0]
        op = uses.sole(value)
    if op is not None and op.kind is OpKind.SCALE_BY_POSITION:
        value = op.inputs[0]
        op = uses.sole(value)
    if op is None:
        return None
    num_heads = op.width // head_dim
    if op.kind is OpKind.RMS_NORM:
        fits = op.attrs["groups"] == num_heads and op.weights and not op.number("offset")
        return _Maker(op.weights, 0, 1, num_pairs) if fits else None
    if (part := uses.part(value)) is None:
        return None
    maker, start = part
    return _Maker(maker.weights, start, num_heads, num_pairs, uses.norm(maker.inputs[0]))
