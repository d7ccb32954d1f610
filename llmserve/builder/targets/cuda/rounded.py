"""Integer values for products of integers: which op produces them, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from llmserve.builder.targets.buffers import Place
from llmserve.builder.targets.cuda.integers import num_groups
from llmserve.builder.targets.cuda.recorder import ANY_ROWS, COLUMNS_OF_WARP, ONE, ROWS, Argument, power_of_two
from llmserve.builder.targets.cuda.values import Values
from llmserve.engine.cuda.layout import ITEM_BYTES, Extent
from llmserve.models.graph import Op
from llmserve.models.number_formats import INT8_ACTIVATIONS

ROUNDED = INT8_ACTIVATIONS
GROUP = ROUNDED.group
# The places for a value's integers, in the form that their kernel expects, and their sizes
Rounding: TypeAlias = tuple[Mapping[str, Argument], Mapping[str, int]]


class RoundedValues(Values):
    def _rounded(self, x: str) -> tuple[Place, Place]:
        """Places of a value's integers and their scales; computed for the first product that needs them."""
        if x not in self._done_rounding:
            self._launch_rounding(x, self._rounded_at_once(x, self._buffers[x].width))
        integers, scales = _names(x)
        return self._buffers[integers], self._buffers[scales]

    def _rounded_at_once(self, x: str, width: int) -> Rounding:
        """Places for ops that produce a value's integers directly: also, or only if no op needs the value itself."""
        self._done_rounding.add(x)
        self._uses.update(dict.fromkeys(_names(x), self._rounded_uses[x]))
        integers, scales = _names(x)
        groups = num_groups(width)
        y = self._buffers.new(integers, groups * GROUP, ITEM_BYTES[ROUNDED.name])
        places = self._buffers.new(scales, 2 * groups)  # and sums
        made = {"integers": self._argument(y, ROUNDED.name), "scales": self._argument(places, ROUNDED.scales)}
        strides = {"Y_STRIDE": y.stride, "SCALES_STRIDE": places.stride}
        return made, {"WIDTH": width, **strides, "GROUP": GROUP, "GROUPS": groups}

    def _launch_rounding(self, x: str, rounding: Rounding, rows: tuple[int, int] = ANY_ROWS) -> None:
        """Launch the rounding of an existing value, for so many rows."""
        made, sizes = rounding
        source, groups = self._buffers[x], sizes["GROUPS"]
        tile = min(self._tiles.columns // GROUP, power_of_two(groups)) or 1
        self._record.launch(
            "rowwise.round_rows", {"x": self._value(x), **made},
            {**sizes, "X_STRIDE": source.stride, "TILE_GROUPS": tile}, (ROWS, Extent(fixed=-(-groups // tile)), ONE),
            num_warps=max(1, tile * GROUP // COLUMNS_OF_WARP), rows=rows,
        )  # fmt: skip

    def _read_rounded(self, op: Op) -> None:
        if self._is_quantized(op):
            self._buffers.read(_names(op.inputs[0]))


def _names(x: str) -> tuple[str, str]:
    return f"{x}.integers", f"{x}.scales"
