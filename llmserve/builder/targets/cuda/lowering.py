"""Lowers a Program to launches of the CUDA engine: what each op becomes, what is fused, where every value is.

Sums over the layers are float32; norms and products have the engine's dtype, keys and values the cache's. A slice is a
view. Rotations are postponed to attention and the cache write if no other op reads them. Bias, residual and gated
activation are fused into products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmserve.builder.quantization import WeightPart
from llmserve.builder.targets.buffers import Place
from llmserve.builder.targets.cuda.attention import AttentionLowering
from llmserve.builder.targets.cuda.choosing import ChoiceLowering
from llmserve.builder.targets.cuda.products import ProductLowering
from llmserve.builder.targets.cuda.recorder import Recorder
from llmserve.builder.targets.cuda.states import StateLowering
from llmserve.builder.targets.cuda.streams import StreamLowering
from llmserve.builder.targets.cuda.tiles import Tiles
from llmserve.builder.targets.op_lowering import Rule
from llmserve.builder.targets.tensor_writer import Rows
from llmserve.engine.cuda.layout import StepPart
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.number_formats import FLOAT32
from llmserve.models.spec import Param


@dataclass(frozen=True, slots=True)
class Lowered:
    """Everything in an engine file except its numbers and binaries."""

    record: Recorder
    buffers: tuple[int, ...]  # bytes per row
    stored: Mapping[str, Sequence[Rows]]  # tensors of parameters that have their own
    offsets: Mapping[str, float]  # what is added to a parameter before writing
    query_tokens: int  # queries of one sequence in a tile of attention
    state_bytes: int = 0  # of a sequence


class Lowering(ProductLowering, AttentionLowering, StateLowering, StreamLowering, ChoiceLowering):
    def run(self) -> Lowered:
        self._lower_ops()
        self._choose_tokens()
        buffers = tuple(self._buffers.bytes_per_row)
        state_bytes = FLOAT32.num_bytes(self._state_floats)
        return Lowered(self._record, buffers, self._stored, self._offsets, self._query_tokens, state_bytes)

    def _fuse(self, op: Op, following: Op, after: Op | None) -> int:
        if op.kind is OpKind.LINEAR and self._uses[op.output] == 1:
            if following.kind is OpKind.ADD and following.inputs.count(op.output) == 1:
                norm = after if after is not None and self._can_be_normed(op, following, after) else None
                self._linear_and_add(op, following, norm)
                return 2 if norm is None else 3
            if self._can_be_gated(op, following):
                self._gated_linear(op, following)
                return 2
        return 0

    def _embed(self, op: Op) -> None:
        y = self._new(op, is_wide=True)
        arguments = {
            "token_ids": self._input("token_ids"),
            "chosen": self._choice("tokens"),
            "table": self._matrix(op.weights[0]),
            "y": self._value(op.output),
        }
        constants = {"WIDTH": op.width, "Y_STRIDE": y.stride, "SCALE": op.number("scale")}
        function = "rowwise.embed"
        if num_rows := int(op.number("rows")):
            function, constants = "streams.embed_known", {**constants, "NUM_ROWS": num_rows}
        self._record.by_columns(function, arguments, constants, op.width)

    def _add(self, op: Op) -> None:
        a, b = (self._buffers[name] for name in op.inputs)
        arguments = {"a": self._value(op.inputs[0]), "b": self._value(op.inputs[1])}
        y = self._sum_place(op, op.inputs[0])
        constants = {"WIDTH": op.width, "A_STRIDE": a.stride, "B_STRIDE": b.stride, "Y_STRIDE": y.stride}
        self._record.by_columns("rowwise.add", {**arguments, "y": self._value(op.output)}, constants, op.width)

    def _multiply(self, op: Op) -> None:
        a, b = (self._buffers[name] for name in op.inputs)
        y = self._new(op)
        arguments = dict(zip(("a", "b", "y"), map(self._value, (*op.inputs, op.output)), strict=True))
        constants = {"WIDTH": op.width, "A_STRIDE": a.stride, "B_STRIDE": b.stride, "Y_STRIDE": y.stride}
        self._record.by_columns("rowwise.multiply", arguments, constants, op.width)

    def _scale(self, op: Op) -> None:
        (x,), (weight,) = op.inputs, op.weights
        factors, num_weights = self._vector(weight), math.prod(self._params[weight].shape)
        if x in self._wide:
            self._sum_place(op, x)
        else:
            self._new(op)
        self._scale_by(x, op.output, factors, num_weights)

    def _scale_by_position(self, op: Op) -> None:
        """Scale by factors for all positions, which are computed here."""
        source, y = self._buffers[op.inputs[0]], self._new(op)
        intervals = (np.arange(self._max_seq_len) + int(op.number("shift"))) // int(op.number("interval"))
        factors = (1 + op.number("strength") * np.log(1.0 + intervals)).astype(np.float32)
        arguments = {
            "x": self._value(op.inputs[0]), "positions": self._input("positions"),
            "factors": self._record.constant("growth", factors), "y": self._value(op.output),
        }  # fmt: skip
        constants = {"WIDTH": op.width, "X_STRIDE": source.stride, "Y_STRIDE": y.stride}
        self._record.by_columns("rowwise.scale_by_position", arguments, constants, op.width)

    def _sigmoid_gate(self, op: Op) -> None:
        (x, gate), y = (self._buffers[name] for name in op.inputs), self._new(op)
        arguments = dict(zip(("x", "gate", "y"), map(self._value, (*op.inputs, op.output)), strict=True))
        constants = {
            "WIDTH": op.width, "GATE_WIDTH": gate.width, "SILU": bool(op.number("silu")), "X_STRIDE": x.stride,
            "GATE_STRIDE": gate.stride, "Y_STRIDE": y.stride,
        }  # fmt: skip
        self._record.by_columns("rowwise.sigmoid_gate", arguments, constants, op.width)

    def _activation(self, op: Op) -> None:
        x, y = self._buffers[op.inputs[0]], self._new(op)
        constants = {"WIDTH": op.width, "X_STRIDE": x.stride, "Y_STRIDE": y.stride}
        constants["ACTIVATION"] = str(op.attrs["activation"])  # type: ignore[assignment]
        arguments = {"x": self._value(op.inputs[0]), "y": self._value(op.output)}
        function = "rowwise.activation" if op.kind is OpKind.ACTIVATION else "rowwise.gated_activation"
        self._record.by_columns(function, arguments, constants, op.width)

    def _select_rows(self, op: Op) -> None:
        """The head runs once for each piece of the selected rows, so its inputs from the body are never overwritten."""
        self._record.part = StepPart.HEAD
        self._uses[op.inputs[0]] += 1
        x, y = self._buffers[op.inputs[0]], self._new(op, is_wide=op.inputs[0] in self._wide)
        arguments = {
            "selected": self._choice("selected"),
            "x": self._value(op.inputs[0]),
            "y": self._value(op.output),
        }
        constants = {"WIDTH": op.width, "X_STRIDE": x.stride, "Y_STRIDE": y.stride}
        self._record.by_columns("rowwise.select_rows", arguments, constants, op.width)

    def _slice(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        self._buffers.assign(
            op.output, Place(source.buffer, source.offset + int(op.number("start")), op.width, source.stride)
        )
        if op.inputs[0] in self._wide:
            self._wide.add(op.output)

    RULES: ClassVar[Mapping[OpKind, Rule]] = {
        OpKind.EMBED: Rule(_embed, ("scale", "rows")),
        OpKind.RMS_NORM: Rule(ProductLowering._rms_norm, ("eps", "groups", "offset", "own_weights")),
        OpKind.LAYER_NORM: Rule(ProductLowering._norm_by_columns, ("eps", "groups", "offset")),
        OpKind.LINEAR: Rule(ProductLowering._linear),
        OpKind.SLICE: Rule(_slice, ("start",)),
        OpKind.ROPE: Rule(AttentionLowering._rope, ("head_dim", "inv_freq", "scale")),
        OpKind.ATTENTION: Rule(
            AttentionLowering._attention,
            ("layer", "num_heads", "num_kv_heads", "head_dim", "scale", "window", "soft_cap", "alibi_slopes"),
        ),
        OpKind.GATED_ACTIVATION: Rule(_activation, ("activation",)),
        OpKind.ACTIVATION: Rule(_activation, ("activation",)),
        OpKind.ADD: Rule(_add),
        OpKind.MULTIPLY: Rule(_multiply),
        OpKind.SCALE: Rule(_scale),
        OpKind.SCALE_BY_POSITION: Rule(_scale_by_position, ("strength", "interval", "shift")),
        OpKind.MIX: Rule(StreamLowering._mix, ("groups", "offset", "first")),
        OpKind.SPREAD: Rule(StreamLowering._spread, ("least",)),
        OpKind.OVER_THRESHOLD: Rule(StreamLowering._over_threshold, ("deviations",)),
        OpKind.CONVOLUTION: Rule(StateLowering._convolution, ("taps", "silu", "biased")),
        OpKind.DELTA_RULE: Rule(StateLowering._delta_rule, ("num_heads", "num_key_heads", "key_dim")),
        OpKind.SELECTIVE_SCAN: Rule(StateLowering._selective_scan, ("num_heads", "num_groups", "state_size")),
        OpKind.SIGMOID_GATE: Rule(_sigmoid_gate, ("silu",)),
        OpKind.SELECT_ROWS: Rule(_select_rows),
        OpKind.LOGITS: Rule(ProductLowering._logits, ("scale", "soft_cap")),
    }


def lower(
    program: Program,
    params: Sequence[Param],
    *,
    dtype: str,
    max_seq_len: int,
    block_size: int,
    tiles: Tiles,
    quantized: Mapping[str, Sequence[WeightPart]] | None = None,
    cache_dtype: str = "",
) -> Lowered:
    """`quantized`: parameters with integers, and their formats. `cache_dtype`: of keys and values, if different."""
    return Lowering(
        program, params, quantized=quantized or {}, dtype=dtype, cache_dtype=cache_dtype or dtype,
        max_seq_len=max_seq_len, block_size=block_size, tiles=tiles,
    ).run()  # fmt: skip
