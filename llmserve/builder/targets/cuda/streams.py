"""Lowers Gemma 3n's ops on the CUDA engine: a token's streams, which are sums over layers, and sparse gates."""

from __future__ import annotations

from llmserve.builder.targets.cuda.recorder import COLUMNS_OF_WARP, ONE, ROWS, power_of_two
from llmserve.builder.targets.cuda.values import Values
from llmserve.engine.cuda.layout import Extent
from llmserve.models.graph import Op

MOST_WARPS = 8


class StreamLowering(Values):
    def _mix(self, op: Op) -> None:
        x, z, *coefficients = op.inputs
        groups, y = int(op.number("groups")), self._new(op, is_wide=True)
        width = op.width // groups
        tile = min(self._tiles.columns, power_of_two(width))
        factors = coefficients[0] if coefficients else x
        self._record.launch(
            "streams.mix",
            {"x": self._value(x), "z": self._value(z), "coefficients": self._value(factors),
             "y": self._value(op.output)},
            {"WIDTH": width, "NUM_OTHERS": self._buffers[z].width // width, "FIRST": int(op.number("first")),
             "OFFSET": op.number("offset"), "HAS_COEFFICIENTS": bool(coefficients),
             "X_STRIDE": self._buffers[x].stride, "Z_STRIDE": self._buffers[z].stride,
             "C_STRIDE": self._buffers[factors].stride, "Y_STRIDE": y.stride, "TILE_COLUMNS": tile},
            (ROWS, Extent(fixed=-(-width // tile)), Extent(fixed=groups)), num_warps=max(1, tile // COLUMNS_OF_WARP),
        )  # fmt: skip

    def _spread(self, op: Op) -> None:
        (x, z), y = op.inputs, self._new(op, is_wide=True)
        width, tile = self._buffers[x].width, power_of_two(self._buffers[x].width)
        self._record.launch(
            "streams.spread", {"x": self._value(x), "z": self._value(z), "y": self._value(op.output)},
            {"WIDTH": width, "LEAST": op.number("least"), "X_STRIDE": self._buffers[x].stride,
             "Z_STRIDE": self._buffers[z].stride, "Y_STRIDE": y.stride, "TILE_COLUMNS": tile},
            (ROWS, Extent(fixed=op.width // width), ONE), num_warps=_num_warps(tile),
        )  # fmt: skip

    def _over_threshold(self, op: Op) -> None:
        x, y, tile = self._buffers[op.inputs[0]], self._new(op), power_of_two(op.width)
        self._record.launch(
            "streams.over_threshold", {"x": self._value(op.inputs[0]), "y": self._value(op.output)},
            {"WIDTH": op.width, "DEVIATIONS": op.number("deviations"), "X_STRIDE": x.stride, "Y_STRIDE": y.stride,
             "TILE_COLUMNS": tile},
            (ROWS, ONE, ONE), num_warps=_num_warps(tile),
        )  # fmt: skip


def _num_warps(columns: int) -> int:
    return min(MOST_WARPS, max(1, columns // COLUMNS_OF_WARP))
