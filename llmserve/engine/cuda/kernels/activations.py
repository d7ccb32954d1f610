"""Functions of a number that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def soft_capped(x, CAP: tl.constexpr):
    return tanh(x / CAP) * CAP


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of a gate: "silu", "gelu_tanh" or "gelu"; or, without one, "relu2" or "tanh"."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif KIND == "tanh":
        return tanh(x)
    else:
        tl.static_assert(KIND == "gelu")
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last bits where that is small, too: what 1 + exp(x) loses is in the quotient."""
    small = tl.exp(-tl.abs(x))
    grown = 1.0 + small
    found = tl.where(grown == 1.0, small, tl.log(grown) * (small / (grown - 1.0)))
    return tl.maximum(x, 0.0) + found
