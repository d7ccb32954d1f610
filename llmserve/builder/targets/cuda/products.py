"""Products of the CUDA engine, and what is fused into them: bias, residual, gated activation, scale and soft cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmserve.builder.targets.buffers import NOWHERE, Place
from llmserve.builder.targets.cuda.integers import integer_tensors, num_groups, stored_rows
from llmserve.builder.targets.cuda.recorder import COLUMNS_OF_WARP, ONE, ROWS, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.tiles import FEW_ROWS, SPLIT_ROWS, ProductTile, RowRange
from llmserve.builder.targets.cuda.values import Values
from llmserve.engine.cuda.layout import ITEM_BYTES, TYPES, Address, Extent, Room
from llmserve.models.graph import Op, OpKind
from llmserve.models.number_formats import FLOAT32, INT8_ACTIVATIONS, UNROUNDED

ROUNDED = INT8_ACTIVATIONS  # what products of integers read
GROUP = ROUNDED.group


@dataclass(frozen=True, slots=True)
class Factors:
    """What a product multiplies, as its kernel wants it, for columns [begin, end) of what it makes."""

    begin: int
    end: int
    arguments: Mapping[str, Argument]
    constants: Constants
    ranges: tuple[RowRange, RowRange]
    tile_inputs: int


class ProductLowering(Values):
    def _linear(self, op: Op) -> None:
        y = self._new(op)
        self._product(op, self._value(op.output), y.stride)

    def _linear_and_add(self, op: Op, add: Op) -> None:
        """y = residual + x @ W.T in one pass, over the residual's own place when nobody else needs it."""
        residual = next(name for name in add.inputs if name != op.output)
        place, source = self._buffers[residual], self._value(residual)
        y = self._sum_place(add, residual)
        self._product(op, self._value(add.output), y.stride, source, place)
        self._buffers.read((*op.inputs, *add.inputs))

    def _logits(self, op: Op) -> None:
        y = Argument(Address(Room.LOGITS.value), TYPES[FLOAT32.name], self._program.vocab_size % 4 == 0)
        more = {"SCALE": op.number("scale"), "SOFT_CAP": op.number("soft_cap")}
        self._product(op, y, self._program.vocab_size, more=more)

    def _can_be_gated(self, op: Op, following: Op) -> bool:
        """Whether nobody but a gated activation reads the product `op`, whose sums are in one piece."""
        is_gate = following.kind is OpKind.GATED_ACTIVATION and following.inputs[0] == op.output
        is_plain = len(op.weights) == 1 and len(self._quantized.get(op.weights[0], ())) <= 1
        return is_gate and is_plain and self._tiles.segments(op.width // 2, self._inputs_of(op)) == 1

    def _gated_linear(self, op: Op, gate: Op) -> None:
        (factors,) = self._factors(op)
        y = self._new(gate)
        constants: Constants = {
            **factors.constants, "Y_STRIDE": y.stride, "NUM_COLUMNS": gate.width,
            "ACTIVATION": str(gate.attrs["activation"]), "SEGMENTS": 1,
        }  # fmt: skip
        arguments = {**factors.arguments, "y": self._value(gate.output)}
        for rows in factors.ranges:
            self._launch_product("linear.gated_linear", arguments, constants, factors, rows)
        self._read_rounded(op)
        self._buffers.read((*op.inputs, *gate.inputs))

    def _product(
        self, op: Op, y: Argument, y_stride: int, residual: Argument | None = None, place: Place = NOWHERE,
        more: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        biases = op.weights[1:]
        epilogue: Constants = {
            "RESIDUAL_STRIDE": place.stride, "Y_STRIDE": y_stride, "HAS_BIAS": bool(biases),
            "HAS_RESIDUAL": residual is not None, **(more or {"SCALE": 1.0, "SOFT_CAP": 0.0}),
        }  # fmt: skip
        for factors in self._factors(op):
            nothing = factors.arguments["x"]
            behind = {
                "bias": self._vector(biases[0]).behind(factors.begin) if biases else nothing,
                "residual": residual.behind(factors.begin) if residual else nothing,
                "y": y.behind(factors.begin),
            }
            self._product_of(factors, behind, epilogue)
        self._read_rounded(op)

    def _product_of(self, factors: Factors, behind: Mapping[str, Argument], epilogue: Constants) -> None:
        width = factors.end - factors.begin
        segments = self._tiles.segments(width, int(factors.constants["NUM_INPUTS"]))
        shape: Constants = {**factors.constants, "NUM_COLUMNS": width, "SEGMENTS": segments}
        for rows in factors.ranges:
            if segments > 1 and rows.rows == FEW_ROWS:
                self._in_segments(factors, shape, behind, epilogue, rows)
            else:
                arguments = {**factors.arguments, **behind}
                self._launch_product("linear.linear", arguments, {**shape, **epilogue}, factors, rows)

    def _in_segments(
        self, factors: Factors, shape: Constants, behind: Mapping[str, Argument], epilogue: Constants, rows: RowRange,
    ) -> None:  # fmt: skip
        segments, width = int(shape["SEGMENTS"]), int(shape["NUM_COLUMNS"])
        (parts,) = self._record.scratch(segments * SPLIT_ROWS * width)
        self._launch_product(
            "linear.linear_segments", {**factors.arguments, "parts": parts}, {**shape, "MAX_ROWS": SPLIT_ROWS},
            factors, rows, segments,
        )  # fmt: skip
        columns = min(self._tiles.columns, power_of_two(width))
        self._record.launch(
            "linear.add_segments", {"parts": parts, **behind},
            {"NUM_COLUMNS": width, **epilogue, "SEGMENTS": segments, "MAX_ROWS": SPLIT_ROWS, "TILE_COLUMNS": columns},
            (ROWS, Extent(fixed=-(-width // columns)), ONE), rows=rows.rows,
        )  # fmt: skip

    def _launch_product(
        self, function: str, arguments: Mapping[str, Argument], constants: Constants, factors: Factors, rows: RowRange,
        segments: int = 1,
    ) -> None:  # fmt: skip
        """In the range's tile, with the others as its tactics. `segments`: worked off by programs of their own."""
        width = int(constants["NUM_COLUMNS"])

        def cut(tile: ProductTile) -> tuple[Constants, tuple[Extent, Extent, Extent]]:
            shape = {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_INPUTS": factors.tile_inputs}
            grid = Extent(tile.rows), Extent(fixed=-(-width // tile.columns)), Extent(fixed=segments)
            return {**constants, **shape}, grid

        kernel = self._record.launch(function, arguments, *cut(rows.tile), tile=rows.tile, rows=rows.rows)
        for tile in rows.others:
            self._record.tactic(kernel, function, arguments, *cut(tile), tile)

    def _factors(self, op: Op) -> list[Factors]:
        """Of each run of columns whose weights have the same format."""
        name, x = op.weights[0], op.inputs[0]
        num_inputs = self._inputs_of(op)
        if not self._is_quantized(op):
            value = self._value(x)
            arguments = {"x": value, "x_scales": value, "w": self._matrix(name), "w_scales": value, "row_scales": value}
            constants = _factor_constants(UNROUNDED, self._buffers[x].stride, 0, num_inputs)
            ranges = self._tiles.ranges(of_integers=False)
            return [Factors(0, op.width, arguments, constants, ranges, self._tiles.inputs)]
        integers, scales = self._rounded(x)
        rounded = {"x": self._argument(integers, ROUNDED.name), "x_scales": self._argument(scales, ROUNDED.scales)}
        found = []
        tensor, parts = self._names[name], self._quantized[name]
        stored = self._stored.setdefault(tensor, stored_rows(tensor, parts))
        for rows, part in zip(stored, parts, strict=True):
            format = part.scheme.format
            w, w_scales, row_scales = map(self._record.placed, integer_tensors(rows, format, num_inputs))
            found.append(Factors(
                part.begin, part.end, {**rounded, "w": w, "w_scales": w_scales, "row_scales": row_scales},
                _factor_constants(format.precision, integers.stride, scales.stride, num_inputs),
                self._tiles.ranges(of_integers=True), format.group,
            ))  # fmt: skip
        return found

    def _rounded(self, x: str) -> tuple[Place, Place]:
        """Where the integers of a value are, and their scales: made when the first product wants them."""
        integers, scales = _names_of_rounded(x)
        if x not in self._done_rounding:
            self._done_rounding.add(x)
            self._uses.update({integers: self._rounded_uses[x], scales: self._rounded_uses[x]})
            self._round(x, integers, scales)
        return self._buffers[integers], self._buffers[scales]

    def _round(self, x: str, integers: str, scales: str) -> None:
        source = self._buffers[x]
        tile = min(self._tiles.columns // GROUP, power_of_two(num_groups(source.width))) or 1
        made, constants = self._integers(source.width, integers, scales)
        self._record.launch(
            "rowwise.round_rows", {"x": self._value(x), **made},
            {**constants, "X_STRIDE": source.stride, "TILE_GROUPS": tile},
            (ROWS, Extent(fixed=-(-num_groups(source.width) // tile)), ONE),
            num_warps=max(1, tile * GROUP // COLUMNS_OF_WARP),
        )  # fmt: skip

    def _norm_and_round(self, op: Op) -> None:
        """Of a norm that only products of integers read: nothing else of it is ever stored."""
        source, tile = self._buffers[op.inputs[0]], power_of_two(num_groups(op.width))
        names = _names_of_rounded(op.output)
        self._done_rounding.add(op.output)
        self._uses.update(dict.fromkeys(names, self._rounded_uses[op.output]))
        made, constants = self._integers(op.width, *names)
        self._record.launch(
            "rowwise.rounded_rms_norm",
            {"x": self._value(op.inputs[0]), "weight": self._norm_weight(op), **made},
            {**constants, "EPS": op.number("eps"), "X_STRIDE": source.stride, "TILE_GROUPS": tile},
            (ROWS, ONE, ONE), num_warps=min(8, max(1, tile * GROUP // COLUMNS_OF_WARP)),
        )  # fmt: skip

    def _integers(self, width: int, integers: str, scales: str) -> tuple[dict[str, Argument], dict[str, int]]:
        """Where the integers of a value are to be, as a kernel that makes them wants it."""
        groups = num_groups(width)
        y = self._buffers.new(integers, groups * GROUP, ITEM_BYTES[ROUNDED.name])
        places = self._buffers.new(scales, 2 * groups)  # and sums
        made = {"integers": self._argument(y, ROUNDED.name), "scales": self._argument(places, ROUNDED.scales)}
        strides = {"Y_STRIDE": y.stride, "SCALES_STRIDE": places.stride}
        return made, {"WIDTH": width, **strides, "GROUP": GROUP, "GROUPS": groups}

    def _read_rounded(self, op: Op) -> None:
        if self._is_quantized(op):
            self._buffers.read(_names_of_rounded(op.inputs[0]))

    def _inputs_of(self, op: Op) -> int:
        return self._params[op.weights[0]].shape[1]


def _factor_constants(format_: str, x_stride: int, scales_stride: int, num_inputs: int) -> Constants:
    return {"FORMAT": format_, "X_STRIDE": x_stride, "SCALES_STRIDE": scales_stride, "NUM_INPUTS": num_inputs}


def _names_of_rounded(x: str) -> tuple[str, str]:
    return f"{x}.integers", f"{x}.scales"
