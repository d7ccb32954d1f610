"""Activations in numpy; see `program.ACTIVATIONS` and `program.PLAIN_ACTIVATIONS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from llmserve.builder.quantization import Matrix
from llmserve.models.graph import Op


def gated_activation(op: Op, gate_up: Matrix) -> Matrix:
    gate, up = np.split(gate_up, 2, axis=-1)
    if op.attrs["activation"] == "clamped":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, -7, 7)
        bounded: Matrix = gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
        return bounded
    with np.errstate(over="ignore"):  # exp(-gate) may be infinite for a very negative gate; gate / inf is then correct
        activated: Matrix = ACTIVATIONS[str(op.attrs["activation"])](gate) * up
    return activated


def activation(op: Op, x: Matrix) -> Matrix:
    return ACTIVATIONS[str(op.attrs["activation"])](x)


def sigmoid(x: Matrix) -> Matrix:
    with np.errstate(over="ignore"):  # as above
        y: Matrix = np.reciprocal(1 + np.exp(-x))
    return y


def _silu(x: Matrix) -> Matrix:
    y: Matrix = x / (1 + np.exp(-x))
    return y


def _gelu_tanh(x: Matrix) -> Matrix:
    y: Matrix = (
        np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))
    )
    return y


def _gelu(x: Matrix) -> Matrix:
    y: Matrix = (0.5 * x * (1 + ERF(x * math.sqrt(0.5)))).astype(np.float32)
    return y


def _relu2(x: Matrix) -> Matrix:
    y: Matrix = np.square(np.maximum(x, 0))
    return y


ERF = np.vectorize(math.erf, otypes=[np.float64])  # slow, but only a few networks have it
ACTIVATIONS: Mapping[str, Callable[[Matrix], Matrix]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu2": _relu2,
    "tanh": np.tanh,
}
