"""Lowers the norms of rows on the CUDA engine."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.builder.targets.cuda.integers import num_groups
from llmserve.builder.targets.cuda.recorder import (
    ANY_ROWS,
    COLUMNS_OF_WARP,
    ONE,
    ROWS,
    Argument,
    Constants,
    power_of_two,
)
from llmserve.builder.targets.cuda.rounded import GROUP, RoundedValues
from llmserve.engine.cuda.layout import Extent
from llmserve.models.graph import Op, OpKind


class NormLowering(RoundedValues):
    def _rms_norm(self, op: Op) -> None:
        if int(op.number("groups")) == 1 and op.output in self._only_rounded:
            self._norm_and_round(op)
            return
        if op.number("own_weights"):
            self._norm_by_columns(op)
            return
        self._new(op)
        self._launch_rms_norm(op)

    def _launch_rms_norm(self, op: Op, rows: tuple[int, int] = ANY_ROWS) -> None:
        self._launch_norm("rowwise.rms_norm", op, {"weight": self._norm_weight(op)}, {}, rows)

    def _norm_by_columns(self, op: Op) -> None:
        weight, biases = self._norm_weight(op), op.weights[1:]
        weights = {"weight": weight, "bias": self._vector(biases[0]) if biases else weight}
        kinds = {"IS_CENTERED": op.kind is OpKind.LAYER_NORM, "HAS_BIAS": bool(biases)}
        self._new(op)
        self._launch_norm("rowwise.norm_by_columns", op, weights, kinds)

    def _launch_norm(
        self, function: str, op: Op, weights: Mapping[str, Argument], more: Constants,
        rows: tuple[int, int] = ANY_ROWS,
    ) -> None:  # fmt: skip
        source, y, groups = self._buffers[op.inputs[0]], self._buffers[op.output], int(op.number("groups"))
        width = op.width // groups
        tile = power_of_two(width)
        tile_groups = self._tiles.heads(groups, tile)
        constants = {
            "GROUP": width, "NUM_GROUPS": groups, "EPS": op.number("eps"), "X_STRIDE": source.stride,
            "Y_STRIDE": y.stride, "TILE_GROUPS": tile_groups, "TILE_COLUMNS": tile, **more,
        }  # fmt: skip
        arguments = {"x": self._value(op.inputs[0]), **weights, "y": self._value(op.output)}
        self._record.launch(
            function, arguments, constants, (ROWS, Extent(fixed=-(-groups // tile_groups)), ONE),
            num_warps=num_warps(tile * tile_groups), rows=rows,
        )  # fmt: skip

    def _norm_and_round(self, op: Op) -> None:
        """For a norm that only products of integers read: only its integers are stored."""
        source, tile = self._buffers[op.inputs[0]], power_of_two(num_groups(op.width))
        made, constants = self._rounded_at_once(op.output, op.width)
        self._record.launch(
            "rowwise.rounded_rms_norm",
            {"x": self._value(op.inputs[0]), "weight": self._norm_weight(op), **made},
            {**constants, "EPS": op.number("eps"), "X_STRIDE": source.stride, "TILE_GROUPS": tile},
            (ROWS, ONE, ONE), num_warps=num_warps(tile * GROUP),
        )  # fmt: skip


def num_warps(columns: int) -> int:
    """For a program that normalizes so many columns."""
    return min(8, max(1, columns // COLUMNS_OF_WARP))
