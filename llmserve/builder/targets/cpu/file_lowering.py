"""Collects the results of a lowering for the CPU: operations, tensors of the engine file, and their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.builder.quantization import MATRICES, WeightPart, stored_names
from llmserve.builder.targets.buffers import Place
from llmserve.builder.targets.cpu.lowered import GROUPED, DeviceOp
from llmserve.builder.targets.op_lowering import OpLowering, turned_for_others
from llmserve.builder.targets.tensor_writer import Rows
from llmserve.engine.cpu.layout import PANEL_COLUMNS, DType, Layout, TensorEntry
from llmserve.engine.cpu.op_codes import OpCode, RowsOf
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.spec import Param


class FileLowering(OpLowering):
    def __init__(
        self, program: Program, params: Sequence[Param], *, dtype: DType, quantized: Mapping[str, Sequence[WeightPart]]
    ) -> None:
        super().__init__(program, stride_bytes=4)
        self._params = {param.name: param for param in params}
        self._stored = stored_names(params, quantized)
        matrices = {name for op in program.ops for name in op.weights[: MATRICES.get(op.kind, 0)]}
        self._packed = {self._stored[name] for name in matrices}
        self._dtype = dtype
        self._quantized = quantized
        self._ops: list[DeviceOp] = []
        self._tensors: dict[str, TensorEntry] = {}
        self._rows: dict[str, list[Rows]] = {}
        self._constants: dict[str, tuple[float, ...]] = {}
        self._offsets: dict[str, float] = {}
        self._tables: dict[str, str] = {}  # constant name -> value that holds the step's cosines and sines
        self._selected = _selected_values(program)
        self._before: dict[str, Op] = {}  # value -> the op that makes it, postponed to the quantization of its reader
        self._written: set[int] = set()  # layers of the cache
        self._turned: dict[str, Place] = {}  # value -> rope table; the values at its place are not rotated yet
        self._turned_for_others = turned_for_others(program)

    def _in_place(self, code: OpCode, op: Op, place: Place, scalar: float, *, unless: float) -> None:
        if scalar != unless:
            self._emit(code, op, place, fields={"scalar": scalar})

    def _emit(self, code: OpCode, op: Op, output: Place, **details: Any) -> None:
        rows = RowsOf.SELECTED if op.output in self._selected else RowsOf.TOKENS
        self._ops.append(DeviceOp(code, output, **{"rows": rows} | details))

    def _param(self, name: str) -> int:
        rows, cols = self._params[name].shape
        stored = self._stored[name]
        layout = Layout.PANELS if stored in self._packed else Layout.ROWS
        self._keep(stored, Rows(stored, 0, rows))
        return self._tensor(stored, self._dtype, rows, cols, layout)

    def _look_up(self, code: OpCode, op: Op, begin: int) -> None:
        """Look up rows of a table, from `begin` on."""
        name, (rows, cols) = op.weights[0], self._params[op.weights[0]].shape
        self._keep(name, Rows(name, begin, rows))
        table = self._tensor(name, self._dtype, rows - begin, cols)
        self._emit(code, op, self._buffers.new(op.output, op.width), tensors=(table,))

    def _grouped(self, weight: str, part: WeightPart) -> tuple[int, ...]:
        """The tensors of a quantized part: its values, and the data of its groups and its outputs."""
        rows, cols = part.end - part.begin, self._params[weight].shape[1]
        name, format = self._keep_part(self._stored[weight], part), part.scheme.format
        grouped = GROUPED[format]
        groups = -(-rows // PANEL_COLUMNS) * -(-cols // grouped.inputs)
        return (
            self._tensor(name, grouped.values, rows, cols, Layout.PANELS),
            self._tensor(f"{name}.groups", grouped.groups, groups, grouped.group_columns),
            self._tensor(f"{name}.row_scale", DType.FLOAT32, 1, rows),
        )

    def _norm_tensors(self, op: Op) -> tuple[int, ...]:
        """A norm multiplies with offset + weight; the sum is taken in float32 when the engine is written."""
        if not op.weights:
            return (self._constant("ones", (1.0,) * (op.width // int(op.number("groups")))),)
        name, offset = op.weights[0], op.number("offset")
        assert self._offsets.setdefault(name, offset) == offset
        return tuple(map(self._vector, op.weights))

    def _vector(self, name: str) -> int:
        count = self._params[name].num_elements
        self._keep(name, Rows(name, 0, count))
        return self._tensor(name, DType.FLOAT32, 1, count)

    def _bias(self, name: str, part: WeightPart) -> int:
        return self._tensor(self._keep_part(name, part), DType.FLOAT32, 1, part.end - part.begin)

    def _keep_part(self, name: str, part: WeightPart) -> str:
        """The name of the tensor for these rows of a parameter; the parameter's own name if it has all of them."""
        is_all = part.end - part.begin == self._params[name].shape[0]
        tensor = name if is_all else f"{name}[{part.begin}:{part.end}]"
        self._keep(name, Rows(tensor, part.begin, part.end, part.scheme if name in self._quantized else None))
        return tensor

    def _keep(self, name: str, rows: Rows) -> None:
        known = self._rows.setdefault(name, [])
        if rows not in known:
            known.append(rows)

    def _constant(self, kind: str, values: Any) -> int:
        """A tensor with `values`; equal ones are stored once."""
        for name, known in self._constants.items():
            if known == values and name.startswith(kind):
                return list(self._tensors).index(name)
        name = f"{kind}.{len(self._constants)}"
        self._constants[name] = tuple(values)
        return self._tensor(name, DType.FLOAT32, 1, len(values))

    def _tensor(self, name: str, dtype: DType, rows: int, cols: int, layout: Layout = Layout.ROWS) -> int:
        entry = TensorEntry(name, dtype, rows, cols, layout)
        assert self._tensors.setdefault(name, entry) == entry
        return list(self._tensors).index(name)


def _selected_values(program: Program) -> set[str]:
    """Values with one row per selected row."""
    found: set[str] = set()
    for op in program.ops:
        if op.kind in (OpKind.SELECT_ROWS, OpKind.POOL) or not found.isdisjoint(op.inputs):
            found.add(op.output)
    return found
