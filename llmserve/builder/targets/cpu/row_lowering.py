"""Lowers ops that work on each row separately."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llmserve.builder.targets.cpu.file_lowering import FileLowering
from llmserve.builder.targets.op_lowering import Rule
from llmserve.engine.cpu.op_codes import OpCode
from llmserve.models.graph import Op, OpKind


class RowLowering(FileLowering):
    def _scale_by_position(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        interval, shift = (int(op.number(name)) for name in ("interval", "shift"))
        fields = {"scalar": op.number("strength"), "groups": interval, "window": shift}
        output = self._buffers.over(op.output, op.inputs[0])
        self._emit(OpCode.SCALE_BY_POSITION, op, output, inputs=(source,), fields=fields)

    def _add(self, op: Op) -> None:
        left, right = (self._buffers[name] for name in op.inputs)
        code = OpCode.ADD if op.kind is OpKind.ADD else OpCode.MULTIPLY
        self._emit(code, op, self._buffers.over(op.output, op.inputs[0]), inputs=(left, right))

    def _sigmoid_gate(self, op: Op) -> None:
        x, gate = (self._buffers[name] for name in op.inputs)
        fields = {"groups": int(op.number("silu"))}
        output = self._buffers.over(op.output, op.inputs[0])
        self._emit(OpCode.SIGMOID_GATE, op, output, inputs=(x, gate), fields=fields)

    def _scale(self, op: Op) -> None:
        source, output = self._buffers[op.inputs[0]], self._buffers.over(op.output, op.inputs[0])
        [factors], tensors = self._params[op.weights[0]].shape, (self._vector(op.weights[0]),)
        if factors > 1:
            self._emit(OpCode.MULTIPLY, op, output, inputs=(source,), tensors=tensors)
            return
        assert output == source, "scaling requires a value without other readers"
        self._emit(OpCode.SCALE, op, output, tensors=tensors)

    def _mix(self, op: Op) -> None:
        inputs = tuple(self._buffers[name] for name in op.inputs)
        groups, first = (int(op.number(name)) for name in ("groups", "first"))
        fields = {"groups": groups, "window": first, "scalar": op.number("offset")}
        self._emit(OpCode.MIX, op, self._buffers.new(op.output, op.width), inputs=inputs, fields=fields)

    def _spread(self, op: Op) -> None:
        inputs = tuple(self._buffers[name] for name in op.inputs)
        output, fields = self._buffers.new(op.output, op.width), {"scalar": op.number("least")}
        self._emit(OpCode.SPREAD, op, output, inputs=inputs, fields=fields)

    def _with_hidden(self, op: Op) -> None:
        source = self._buffers[op.inputs[0]]
        self._emit(OpCode.WITH_HIDDEN, op, self._buffers.new(op.output, op.width), inputs=(source,))

    def _over_threshold(self, op: Op) -> None:
        source, output = self._buffers[op.inputs[0]], self._buffers.over(op.output, op.inputs[0])
        self._emit(OpCode.OVER_THRESHOLD, op, output, inputs=(source,), fields={"scalar": op.number("deviations")})

    RULES: ClassVar[Mapping[OpKind, Rule]] = {
        OpKind.SCALE_BY_POSITION: Rule(_scale_by_position, ("strength", "interval", "shift")),
        OpKind.ADD: Rule(_add),
        OpKind.MULTIPLY: Rule(_add),
        OpKind.SCALE: Rule(_scale),
        OpKind.SIGMOID_GATE: Rule(_sigmoid_gate, ("silu",)),
        OpKind.MIX: Rule(_mix, ("groups", "offset", "first")),
        OpKind.SPREAD: Rule(_spread, ("least",)),
        OpKind.WITH_HIDDEN: Rule(_with_hidden, ("hidden",)),
        OpKind.OVER_THRESHOLD: Rule(_over_threshold, ("deviations",)),
    }
