"""Producers and readers of a Program's values, which determine what may be moved between weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from llmserve.builder.quantization import LINEAR_KINDS
from llmserve.models.graph import Op, OpKind, Program

NORMS = (OpKind.RMS_NORM, OpKind.LAYER_NORM)


class Uses:
    def __init__(self, program: Program) -> None:
        self._made_by = {op.output: op for op in program.ops}
        self._weights = Counter(name for op in program.ops for name in op.weights)
        self._read_by: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in op.inputs:
                self._read_by.setdefault(name, []).append(op)

    def is_own(self, op: Op) -> bool:
        """Whether no other op reads its weights."""
        return all(self._weights[name] == 1 for name in op.weights)

    def readers(self, value: str, among: Collection[str]) -> tuple[str, ...]:
        """The matrices that multiply a value; all must be in `among`. None if anything else reads it."""
        ops = self._read_by.get(value, [])
        sound = all(op.kind in LINEAR_KINDS and op.weights[0] in among and self.is_own(op) for op in ops)
        return tuple(op.weights[0] for op in ops) if sound else ()

    def sole(self, value: str) -> Op | None:
        """The producer of a value with one reader, if its weights have no other use."""
        op = self._made_by[value]
        return op if self.is_own(op) and len(self._read_by[value]) == 1 else None

    def maker(self, value: str) -> Op | None:
        """The linear layer that makes a value with one reader."""
        op = self.sole(value)
        return op if op is not None and op.kind is OpKind.LINEAR else None

    def norm(self, value: str) -> Op | None:
        """The producer of a value, if it is a norm of whole rows with weights."""
        op = self._made_by[value]
        return op if op.kind in NORMS and op.weights and op.number("groups") == 1 else None

    def part(self, value: str) -> tuple[Op, int] | None:
        """The linear layer that a value with one reader is a part of, if the part has no other readers; its start."""
        op = self._made_by[value]
        if op.kind is not OpKind.SLICE:
            return None if (maker := self.maker(value)) is None else (maker, 0)
        maker, others = self._made_by[op.inputs[0]], [other for other in self._read_by[op.inputs[0]] if other is not op]
        if maker.kind is not OpKind.LINEAR or not self.is_own(maker) or len(self._read_by[value]) != 1:
            return None
        return (maker, int(op.number("start"))) if all(_are_apart(op, other) for other in others) else None


def _are_apart(one: Op, other: Op) -> bool:
    if other.kind is not OpKind.SLICE:
        return False
    begin, other_begin = int(one.number("start")), int(other.number("start"))
    return begin + one.width <= other_begin or other_begin + other.width <= begin
