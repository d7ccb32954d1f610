"""The CPU engine's form of a Program: its operations and tensors, and the layout of each number format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.targets.buffers import NOWHERE, Place
from llmserve.builder.targets.tensor_writer import Rows
from llmserve.engine.cpu.layout import NO_TENSOR, OP, PANEL_COLUMNS, DType, TensorEntry
from llmserve.engine.cpu.op_codes import Before, Blocks, OpCode, RowsOf
from llmserve.models.graph import Op, OpKind
from llmserve.models.number_formats import BLOCKS, INT4, INT8, WeightFormat

ACTIVATIONS = {  # codes for an activation as its own op, and before a quantization
    "silu": (OpCode.GATED_SILU, Before.GATED_SILU),
    "gelu_tanh": (OpCode.GATED_GELU_TANH, Before.GATED_GELU_TANH),
    "gelu": (OpCode.GATED_GELU, Before.GATED_GELU),
    "clamped": (OpCode.GATED_CLAMPED, Before.GATED_CLAMPED),
}
PLAIN_ACTIVATIONS = {
    "gelu": (OpCode.GELU, Before.GELU),
    "gelu_tanh": (OpCode.GELU_TANH, Before.GELU_TANH),
    "relu2": (OpCode.RELU_SQUARED, Before.RELU_SQUARED),
    "tanh": (OpCode.SOFT_CAP, Before.NOTHING),  # with a limit of one
}
ACTIVATIONS_OF: Mapping[OpKind, Mapping[str, tuple[OpCode, Before]]] = {
    OpKind.GATED_ACTIVATION: ACTIVATIONS,
    OpKind.ACTIVATION: PLAIN_ACTIVATIONS,
    OpKind.EXPERTS: ACTIVATIONS,
}


def activations_of(op: Op) -> Mapping[str, tuple[OpCode, Before]]:
    """The activation codes for an op; None if it has no activation."""
    if op.attrs.get("plain", False):
        return {name: codes for name, codes in PLAIN_ACTIVATIONS.items() if name != "tanh"}
    return ACTIVATIONS_OF.get(op.kind, {})


NORMS = {
    OpKind.RMS_NORM: (OpCode.RMS_NORM, Before.RMS_NORM),
    OpKind.LAYER_NORM: (OpCode.LAYER_NORM, Before.LAYER_NORM),
}


class Grouped(NamedTuple):
    """How the engine file stores weights that share scales, and which operation multiplies them."""

    code: OpCode
    values: DType  # by `pack_panels`
    groups: DType  # by `pack_groups`
    group_columns: int  # of a panel
    inputs: int = 32  # inputs that share these columns
    blocks: Blocks | None = None

    @property
    def fields(self) -> Mapping[str, int]:
        """Fields of an operation that multiplies them or looks up rows."""
        return {} if self.blocks is None else {"groups": self.blocks}


def _blocks(values: DType, blocks: Blocks, num_bytes: int, inputs: int) -> Grouped:
    return Grouped(OpCode.LINEAR_BLOCKS, values, DType.INT8, num_bytes * PANEL_COLUMNS, inputs, blocks)


GROUPED: Mapping[WeightFormat, Grouped] = {  # all formats that the target multiplies
    INT8: Grouped(OpCode.LINEAR_INT8, DType.INT8, DType.FLOAT16, PANEL_COLUMNS),
    INT4: Grouped(OpCode.LINEAR_INT4, DType.INT4, DType.INT8, 2 * PANEL_COLUMNS),
    BLOCKS["Q4_0"]: _blocks(DType.INT4, Blocks.SCALE, 2, 32),
    BLOCKS["Q4_1"]: _blocks(DType.INT4, Blocks.SCALE_AND_MINIMUM, 4, 32),
    BLOCKS["Q5_0"]: _blocks(DType.INT5, Blocks.SCALE, 2, 32),
    BLOCKS["Q5_1"]: _blocks(DType.INT5, Blocks.SCALE_AND_MINIMUM, 4, 32),
    BLOCKS["Q4_K"]: _blocks(DType.INT4, Blocks.SCALES, 20, 256),
    BLOCKS["Q5_K"]: _blocks(DType.INT5, Blocks.SCALES, 20, 256),
    BLOCKS["Q6_K"]: _blocks(DType.INT6, Blocks.HALF_SCALES, 18, 256),
    BLOCKS["Q3_K"]: _blocks(DType.INT3, Blocks.HALF_SCALES, 18, 256),
    BLOCKS["Q2_K"]: _blocks(DType.INT2, Blocks.HALF_SCALES_AND_MINIMA, 20, 256),
    BLOCKS["IQ4_NL"]: _blocks(DType.INT4, Blocks.UNEVEN, 2, 32),
    BLOCKS["IQ4_XS"]: _blocks(DType.INT4, Blocks.UNEVEN_SCALES, 10, 256),
    BLOCKS["MXFP4"]: _blocks(DType.INT4, Blocks.EXPONENT, 1, 32),
}


@dataclass(frozen=True, slots=True)
class DeviceOp:
    code: OpCode
    output: Place = NOWHERE
    inputs: tuple[Place, ...] = ()
    tensors: tuple[int, ...] = ()
    rows: RowsOf = RowsOf.TOKENS
    fields: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lowered:
    """Everything in an engine file except its numbers. `tensors` are in the order of `sources`."""

    ops: tuple[DeviceOp, ...]
    tensors: tuple[TensorEntry, ...]
    constants: Mapping[str, tuple[float, ...]]  # tensors without a parameter: rotary frequencies, ALiBi slopes
    offsets: Mapping[str, float]  # what is added to a parameter before writing: a norm's offset to its weight
    stored: Mapping[str, Sequence[Rows]]  # parameter -> where its rows are, perhaps under another's name
    num_quantized: int  # parameters kept as integers
    buffers: tuple[int, ...]  # bytes per row

    def op_records(self) -> NDArray[Any]:
        records = np.zeros(len(self.ops), OP)
        for record, op in zip(records, self.ops, strict=True):
            record["kind"], record["rows"], record["output"] = op.code, op.rows, op.output.record
            places = (*op.inputs, NOWHERE, NOWHERE, NOWHERE)[:3]
            for slot, place in enumerate(places):
                record["inputs"][slot] = place.record
            record["tensors"] = (*op.tensors, *[NO_TENSOR] * 4)[:4]
            for name, value in op.fields.items():
                record[name] = value
        return records
