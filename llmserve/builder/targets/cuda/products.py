"""Lowers the CUDA engine's products, and the ops fused into them: bias, residual, gated activation, scale, soft cap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmserve.builder.quantization import LINEAR_KINDS
from llmserve.builder.targets.buffers import NOWHERE, Place
from llmserve.builder.targets.cuda.integers import integer_tensors, stored_rows
from llmserve.builder.targets.cuda.norms import NormLowering, num_warps
from llmserve.builder.targets.cuda.recorder import ONE, ROWS, Argument, Constants, power_of_two
from llmserve.builder.targets.cuda.rounded import GROUP, ROUNDED, Rounding
from llmserve.builder.targets.cuda.tiles import ProductTile, RowRange
from llmserve.builder.targets.cuda.values import INTEGERS
from llmserve.engine.cuda.layout import ITEM_BYTES, TYPES, Address, Extent, Room
from llmserve.models.graph import Op, OpKind
from llmserve.models.number_formats import FLOAT32, UNROUNDED


class Segments(NamedTuple):
    """Partial sums; each is computed by one program."""

    parts: Argument
    number: int
    rows: RowRange


@dataclass(frozen=True, slots=True)
class Factors:
    """What a product multiplies, in its kernel's format, for columns [begin, end) of the output."""

    begin: int
    end: int
    arguments: Mapping[str, Argument]
    constants: Constants
    ranges: tuple[RowRange, ...]
    tile_inputs: int
    of_integers: bool


class ProductLowering(NormLowering):
    def _linear(self, op: Op) -> None:
        y = self._new(op)
        self._product(op, self._value(op.output), y.stride)

    def _can_be_normed(self, op: Op, add: Op, norm: Op) -> bool:
        """Whether a program that adds up the segments of a row of `op` and a residual can normalize the sums, too. Not
        for integers: their segments are so many that one multiprocessor would read them longer than a launch takes."""
        if norm.kind is not OpKind.RMS_NORM or norm.inputs[0] != add.output or self._is_quantized(op):
            return False
        is_whole = int(norm.number("groups")) == 1 and not norm.number("own_weights")
        segments = self._tiles.segments(op.width, self._inputs_of(op), of_integers=False)
        return is_whole and norm.output not in self._only_rounded and segments > 1

    def _linear_and_add(self, op: Op, add: Op, norm: Op | None = None) -> None:
        """y = residual + x @ W.T in one pass, in the residual's own place if no other op needs it; and a norm of y."""
        residual = next(name for name in add.inputs if name != op.output)
        place, source = self._buffers[residual], self._value(residual)
        y = self._sum_place(add, residual)
        if norm is not None:
            self._new(norm)
        self._product(op, self._value(add.output), y.stride, source, place, norm=norm)
        self._buffers.read((*op.inputs, *add.inputs, *(norm.inputs if norm is not None else ())))

    def _logits(self, op: Op) -> None:
        y = Argument(Address(Room.LOGITS.value), TYPES[FLOAT32.name], self._program.vocab_size % 4 == 0)
        more = {"SCALE": op.number("scale"), "SOFT_CAP": op.number("soft_cap")}
        self._product(op, y, self._program.vocab_size, more=more)

    def _can_be_gated(self, op: Op, following: Op) -> bool:
        """Whether only a gated activation reads the product `op`, whose sums have one segment."""
        is_gate = following.kind is OpKind.GATED_ACTIVATION and following.inputs[0] == op.output
        return is_gate and len(op.weights) == 1 and len(self._quantized.get(op.weights[0], ())) <= 1

    def _gated_linear(self, op: Op, gate: Op) -> None:
        (factors,) = self._factors(op)
        y = self._new(gate)
        segments = self._segments(factors, op.width)
        shape: Constants = {**factors.constants, "SEGMENTS": segments}
        epilogue: Constants = {"Y_STRIDE": y.stride, "ACTIVATION": str(gate.attrs["activation"])}
        output = {"y": self._value(gate.output)}
        of_gate: Constants = {"NUM_COLUMNS": gate.width}
        rounding = self._rounded_at_once(gate.output, gate.width) if gate.output in self._only_rounded else None
        for rows in factors.ranges:
            if rows.is_split(op.width, segments, self._tiles.programs):
                made = self._in_segments(factors, {**shape, "NUM_COLUMNS": op.width}, rows)
                if rounding:
                    self._add_and_round(rounding, {"ACTIVATION": epilogue["ACTIVATION"]}, made)
                else:
                    self._add_segments("linear.add_gated_segments", output, {**epilogue, **of_gate}, made)
            else:
                arguments, constants = {**factors.arguments, **output}, {**shape, **epilogue, **of_gate}
                self._launch_product("linear.gated_linear", arguments, constants, factors, rows.fitting(segments))
                if rounding:
                    self._launch_rounding(gate.output, rounding, rows.rows)
        self._read_factors(op)
        self._buffers.read((*op.inputs, *gate.inputs))

    def _product(
        self, op: Op, y: Argument, y_stride: int, residual: Argument | None = None, place: Place = NOWHERE,
        more: Mapping[str, float] | None = None, norm: Op | None = None,
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
            self._product_of(factors, behind, epilogue, norm)
        self._read_factors(op)

    def _product_of(
        self, factors: Factors, behind: Mapping[str, Argument], epilogue: Constants, norm: Op | None
    ) -> None:
        width = factors.end - factors.begin
        segments = self._segments(factors, width)
        shape: Constants = {**factors.constants, "NUM_COLUMNS": width, "SEGMENTS": segments}
        for rows in factors.ranges:
            if rows.is_split(width, segments, self._tiles.programs):
                made = self._in_segments(factors, shape, rows)
                if norm is not None:
                    self._add_and_norm(norm, behind, {"NUM_COLUMNS": width, **epilogue}, made)
                else:
                    self._add_segments("linear.add_segments", behind, {"NUM_COLUMNS": width, **epilogue}, made)
            else:
                arguments = {**factors.arguments, **behind}
                constants = {**shape, **epilogue}
                self._launch_product("linear.linear", arguments, constants, factors, rows.fitting(segments))
                if norm is not None:
                    self._launch_rms_norm(norm, rows.rows)

    def _segments(self, factors: Factors, width: int) -> int:
        num_inputs = int(factors.constants["NUM_INPUTS"])
        return self._tiles.segments(width, num_inputs, of_integers=factors.of_integers)

    def _in_segments(self, factors: Factors, shape: Constants, rows: RowRange) -> Segments:
        segments, width, most = int(shape["SEGMENTS"]), int(shape["NUM_COLUMNS"]), rows.rows[1]
        (parts,) = self._record.scratch(segments * most * width)
        function, arguments = "linear.linear_segments", factors.arguments
        if rows.in_words:
            words = {name: replace(arguments[name], type=INTEGERS) for name in ("x", "w")}
            function, arguments = "linear.words_segments", {**arguments, **words}
        constants = {**shape, "MAX_ROWS": most}
        self._launch_product(function, {**arguments, "parts": parts}, constants, factors, rows, segments)
        return Segments(parts, segments, rows)

    def _add_segments(
        self, function: str, behind: Mapping[str, Argument], constants: Constants, made: Segments
    ) -> None:  # fmt: skip
        width = int(constants["NUM_COLUMNS"])
        columns = min(self._tiles.columns, power_of_two(width))
        sums: Constants = {"SEGMENTS": made.number, "MAX_ROWS": made.rows.rows[1], "TILE_COLUMNS": columns}
        grid = ROWS, Extent(fixed=-(-width // columns)), ONE
        self._record.launch(function, {"parts": made.parts, **behind}, {**constants, **sums}, grid, rows=made.rows.rows)

    def _add_and_norm(self, norm: Op, behind: Mapping[str, Argument], constants: Constants, made: Segments) -> None:
        tile = power_of_two(norm.width)
        arguments = {
            "parts": made.parts, **behind, "weight": self._norm_weight(norm), "normed": self._value(norm.output)
        }  # fmt: skip
        sums: Constants = {
            "SEGMENTS": made.number, "MAX_ROWS": made.rows.rows[1], "EPS": norm.number("eps"),
            "NORMED_STRIDE": self._buffers[norm.output].stride, "TILE_COLUMNS": tile,
        }  # fmt: skip
        self._record.launch(
            "linear.add_normed_segments", arguments, {**constants, **sums}, (ROWS, ONE, ONE),
            num_warps=num_warps(tile), rows=made.rows.rows,
        )  # fmt: skip

    def _add_and_round(self, rounding: Rounding, activation: Constants, made: Segments) -> None:
        """For a gated product that only products of integers read."""
        places, sizes = rounding
        tile = min(self._tiles.columns // GROUP, power_of_two(int(sizes["GROUPS"]))) or 1
        sums: Constants = {"SEGMENTS": made.number, "MAX_ROWS": made.rows.rows[1], "TILE_GROUPS": tile}
        self._record.launch(
            "linear.add_rounded_segments", {"parts": made.parts, **places}, {**sizes, **activation, **sums},
            (ROWS, Extent(fixed=-(-int(sizes["GROUPS"]) // tile)), ONE), rows=made.rows.rows,
        )  # fmt: skip

    def _launch_product(
        self, function: str, arguments: Mapping[str, Argument], constants: Constants, factors: Factors, rows: RowRange,
        segments: int = 1,
    ) -> None:  # fmt: skip
        """Launch in the range's tile, with the other tiles as tactics. `segments`: processed by separate programs."""
        width = int(constants["NUM_COLUMNS"])

        def cut(tile: ProductTile) -> tuple[Constants, tuple[Extent, Extent, Extent]]:
            shape = {"TILE_ROWS": tile.rows, "TILE_COLUMNS": tile.columns, "TILE_INPUTS": factors.tile_inputs}
            columns = tile.columns // 2 if "gated" in function else tile.columns
            grid = Extent(tile.rows), Extent(fixed=-(-width // columns)), Extent(fixed=segments)
            return {**constants, **shape}, grid

        kernel = self._record.launch(function, arguments, *cut(rows.tile), tile=rows.tile, rows=rows.rows)
        for tile in rows.others if self._tiles.has_choice else ():
            self._record.tactic(kernel, function, arguments, *cut(tile), tile)

    def _factors(self, op: Op) -> list[Factors]:
        """Factors for each range of columns whose weights have the same format."""
        name, x = op.weights[0], op.inputs[0]
        num_inputs = self._inputs_of(op)
        if not self._is_quantized(op):
            x = self._narrow(x)
            value = self._value(x)
            arguments = {"x": value, "x_scales": value, "w": self._matrix(name), "w_scales": value, "row_scales": value}
            constants = _factor_constants(UNROUNDED, self._buffers[x].stride, 0, num_inputs)
            ranges = self._tiles.ranges(of_integers=False)
            return [Factors(0, op.width, arguments, constants, ranges, self._tiles.inputs, of_integers=False)]
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
                self._tiles.ranges(of_integers=True), format.group, of_integers=True,
            ))  # fmt: skip
        return found

    def _narrow(self, x: str) -> str:
        """A value in the engine's dtype, for products of floats; made for the first product that needs it."""
        if x not in self._wide or self._dtype == FLOAT32.name:
            return x
        name = _narrowed(x)
        if name not in self._uses:
            readers = [op for op in self._program.ops if op.kind in LINEAR_KINDS and op.inputs[0] == x]
            self._uses[name] = sum(not self._is_quantized(op) for op in readers)
            self._buffers.new(name, self._buffers[x].width, ITEM_BYTES[self._dtype])
            self._scale_by(x, name, self._record.constant("ones", np.ones(1, np.float32)), 1)
        return name

    def _read_factors(self, op: Op) -> None:
        self._read_rounded(op)
        if not self._is_quantized(op) and (name := _narrowed(op.inputs[0])) in self._uses:
            self._buffers.read((name,))

    def _inputs_of(self, op: Op) -> int:
        return self._params[op.weights[0]].shape[1]


def _narrowed(x: str) -> str:
    return f"{x}.narrow"


def _factor_constants(format_: str, x_stride: int, scales_stride: int, num_inputs: int) -> Constants:
    return {"FORMAT": format_, "X_STRIDE": x_stride, "SCALES_STRIDE": scales_stride, "NUM_INPUTS": num_inputs}
