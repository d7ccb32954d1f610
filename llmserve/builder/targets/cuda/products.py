"""Products of the CUDA engine, and what is fused into them: bias, residual, gated activation, scale and soft cap."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.builder.targets.buffers import NOWHERE, Place
from llmserve.builder.targets.cuda.recorder import ONE, ROWS, TYPES, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.tiles import FEW_ROWS, MANY_ROWS, SPLIT_ROWS, ProductTile
from llmserve.builder.targets.cuda.values import Values
from llmserve.engine.cuda.layout import Address, Extent, Room
from llmserve.models.graph import Op, OpKind


class ProductLowering(Values):
    def _linear(self, op: Op) -> None:
        x = self._value(op.inputs[0])
        y = self._new(op)
        self._product(op, x, self._value(op.output), y.stride)

    def _linear_and_add(self, op: Op, add: Op) -> None:
        """y = residual + x @ W.T in one pass, over the residual's own place when nobody else needs it."""
        residual = next(name for name in add.inputs if name != op.output)
        place, source = self._buffers[residual], self._value(residual)
        y = self._sum_place(add, residual)
        self._product(op, self._value(op.inputs[0]), self._value(add.output), y.stride, source, place)
        self._buffers.read((*op.inputs, *add.inputs))

    def _logits(self, op: Op) -> None:
        y = Argument(Address(Room.LOGITS.value), TYPES["float32"], self._program.vocab_size % 4 == 0)
        more = {"SCALE": op.number("scale"), "SOFT_CAP": op.number("soft_cap")}
        self._product(op, self._value(op.inputs[0]), y, self._program.vocab_size, more=more)

    def _can_be_gated(self, op: Op, following: Op) -> bool:
        """Whether nobody but a gated activation reads the product `op`, whose sums are in one piece."""
        is_gate = following.kind is OpKind.GATED_ACTIVATION and following.inputs[0] == op.output
        return is_gate and len(op.weights) == 1 and self._tiles.segments(op.width // 2, self._inputs_of(op)) == 1

    def _gated_linear(self, op: Op, gate: Op) -> None:
        x, weight = self._value(op.inputs[0]), self._matrix(op.weights[0])
        x_stride = self._buffers[op.inputs[0]].stride
        y = self._new(gate)
        constants: Constants = {
            "X_STRIDE": x_stride, "Y_STRIDE": y.stride, "NUM_COLUMNS": gate.width, "NUM_INPUTS": self._inputs_of(op),
            "ACTIVATION": str(gate.attrs["activation"]), "SEGMENTS": 1,
        }  # fmt: skip
        for tile, rows in self._row_ranges():
            self._record.launch(
                "linear.gated_linear", {"x": x, "w": weight, "y": self._value(gate.output)},
                {**constants, **self._tile_constants(tile)}, _product_grid(tile, gate.width), tile=tile, rows=rows,
            )  # fmt: skip
        self._buffers.read((*op.inputs, *gate.inputs))

    def _product(
        self, op: Op, x: Argument, y: Argument, y_stride: int, residual: Argument | None = None,
        place: Place = NOWHERE, more: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        weight, *biases = op.weights
        num_inputs = self._inputs_of(op)
        segments = self._tiles.segments(op.width, num_inputs)
        behind = {
            "bias": self._vector(biases[0]) if biases else x,
            "residual": residual or x,
            "y": y,
        }
        epilogue: Constants = {
            "RESIDUAL_STRIDE": place.stride, "Y_STRIDE": y_stride, "HAS_BIAS": bool(biases),
            "HAS_RESIDUAL": residual is not None, **(more or {"SCALE": 1.0, "SOFT_CAP": 0.0}),
        }  # fmt: skip
        shape: Constants = {
            "X_STRIDE": self._buffers[op.inputs[0]].stride, "NUM_COLUMNS": op.width, "NUM_INPUTS": num_inputs,
            "SEGMENTS": segments,
        }  # fmt: skip
        source = {"x": x, "w": self._matrix(weight)}
        for tile, rows in self._row_ranges():
            grid = _product_grid(tile, op.width)
            if segments > 1 and tile is self._tiles.few:
                self._in_segments(source, shape, behind, epilogue, grid, rows)
            else:
                constants = {**shape, **epilogue, **self._tile_constants(tile)}
                self._record.launch("linear.linear", {**source, **behind}, constants, grid, tile=tile, rows=rows)

    def _in_segments(
        self, source: Mapping[str, Argument], shape: Constants, behind: Mapping[str, Argument], epilogue: Constants,
        grid: tuple[Extent, Extent, Extent], rows: tuple[int, int],
    ) -> None:  # fmt: skip
        tile, segments, width = self._tiles.few, int(shape["SEGMENTS"]), int(shape["NUM_COLUMNS"])
        (parts,) = self._record.scratch(segments * SPLIT_ROWS * width)
        self._record.launch(
            "linear.linear_segments", {**source, "parts": parts},
            {**shape, "MAX_ROWS": SPLIT_ROWS, **self._tile_constants(tile)}, (*grid[:2], Extent(fixed=segments)),
            tile=tile, rows=rows,
        )  # fmt: skip
        columns = min(self._tiles.columns, power_of_two(width))
        self._record.launch(
            "linear.add_segments", {"parts": parts, **behind},
            {"NUM_COLUMNS": width, **epilogue, "SEGMENTS": segments, "MAX_ROWS": SPLIT_ROWS, "TILE_COLUMNS": columns},
            (ROWS, Extent(fixed=-(-width // columns)), ONE), rows=rows,
        )  # fmt: skip

    def _row_ranges(self) -> list[tuple[ProductTile, tuple[int, int]]]:
        return [(self._tiles.few, FEW_ROWS), (self._tiles.many, MANY_ROWS)]

    def _tile_constants(self, tile: ProductTile) -> Constants:
        return {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_INPUTS": self._tiles.inputs}

    def _inputs_of(self, op: Op) -> int:
        return self._params[op.weights[0]].shape[1]


def _product_grid(tile: ProductTile, width: int) -> tuple[Extent, Extent, Extent]:
    return Extent(tile.rows), Extent(fixed=-(-width // tile.columns)), ONE
