"""Codes of the CPU engine's operations and their variants; `kernels/format.h` has the same lists."""

from __future__ import annotations

from enum import IntEnum


class OpCode(IntEnum):
    """Operations of the device; roles of their operands are listed in `kernels/format.h`."""

    EMBED = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    LINEAR_INT8 = 4
    ROPE_TABLE = 5
    CACHE_WRITE = 6
    ATTENTION = 7
    GATED_SILU = 8
    ADD = 9
    SELECT_ROWS = 10
    LINEAR_INT4 = 11
    GATED_GELU_TANH = 12
    GATED_GELU = 13
    SCALE = 14
    SOFT_CAP = 15
    ROUTE = 16
    DISPATCH = 17
    COMBINE = 18
    SIGMOID_GATE = 19
    GATED_CLAMPED = 20
    ROPE = 21
    LINEAR_BLOCKS = 22
    LAYER_NORM = 23
    GELU = 24
    GELU_TANH = 25
    RELU_SQUARED = 26
    SCALE_BY_POSITION = 27
    CONVOLUTION = 28
    DELTA_RULE = 29
    MULTIPLY = 30
    EMBED_POSITION = 31
    EMBED_SEGMENT = 32
    POOL = 33
    SELECTIVE_SCAN = 34
    MIX = 35
    SPREAD = 36
    OVER_THRESHOLD = 37
    WITH_HIDDEN = 38


class Blocks(IntEnum):
    """The data of blocks of a GGUF file."""

    SCALE = 0
    SCALE_AND_MINIMUM = 1
    SCALES = 2
    HALF_SCALES = 3
    HALF_SCALES_AND_MINIMA = 4
    UNEVEN = 5
    UNEVEN_SCALES = 6
    EXPONENT = 7


class RowsOf(IntEnum):
    """The rows of an operation."""

    TOKENS = 0
    SELECTED = 1
    CHOSEN = 2  # each expert of each token


class Before(IntEnum):
    """What a quantization does to its rows first."""

    NOTHING = 0
    RMS_NORM = 1
    GATED_SILU = 2
    GATED_GELU_TANH = 3
    GATED_GELU = 4
    GATED_CLAMPED = 5
    LAYER_NORM = 6
    GELU = 7
    GELU_TANH = 8
    RELU_SQUARED = 9


ROUTE_TO_ONE, ROUTE_SIGMOID, ROUTE_BY_BEST = 1, 2, 4  # how experts are weighted, and their groups
IN_STRETCHES, BIDIRECTIONAL = 1, 2  # what attention sees
NORMALIZED = 4  # how texts are pooled: added to the index of `program.POOLINGS`
LINEAR_CODES = (OpCode.LINEAR, OpCode.LINEAR_INT8, OpCode.LINEAR_INT4, OpCode.LINEAR_BLOCKS)
