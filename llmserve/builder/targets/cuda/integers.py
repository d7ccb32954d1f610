"""Weights of integers, as the kernels of `linear.py` read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.quantization import QUANTIZED_GROUP, Quantized, WeightPart
from llmserve.engine.cuda.layout import PANEL_OUTPUTS, PlacedTensor

FLOATS, INT8, INT4 = "float", "int8", "int4"  # formats of what is multiplied


def num_groups(num_inputs: int) -> int:
    """In pairs, since four bits of two groups share their bytes."""
    return 2 * -(-num_inputs // (2 * QUANTIZED_GROUP))


class StoredPart(NamedTuple):
    """Rows of a parameter that have one format, and the tensors that hold them.

    `values`: panels of PANEL_OUTPUTS outputs; in each, for one group of inputs after the other, the integers of every
    output. Those of four bits come in pairs of groups, of which the second has the upper halves of the bytes.
    `scales`: likewise, a number for each group and output: of eight bits float16; of four a byte, which is the root of
    the scale, and behind those of the panel's outputs as many zero points, in sixteenths.
    `row_scales`: one for each output.
    """

    name: str  # of the tensor of values
    part: WeightPart
    num_inputs: int

    @property
    def format(self) -> str:
        return self.part.scheme.name

    @property
    def num_outputs(self) -> int:
        return self.part.end - self.part.begin

    def tensors(self) -> tuple[PlacedTensor, PlacedTensor, PlacedTensor]:
        """Values, scales, scales of outputs."""
        outputs, groups = -(-self.num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS, num_groups(self.num_inputs)
        of_rows = PlacedTensor(f"{self.name}.row_scales", "float32", 1, outputs)
        if self.format == INT8:
            values = PlacedTensor(self.name, "int8", outputs, groups * QUANTIZED_GROUP)
            return values, PlacedTensor(f"{self.name}.scales", "float16", outputs, groups), of_rows
        values = PlacedTensor(self.name, "uint8", outputs, groups // 2 * QUANTIZED_GROUP)
        return values, PlacedTensor(f"{self.name}.scales", "uint8", outputs, 2 * groups), of_rows

    def packed(self, found: Quantized) -> Iterator[tuple[str, NDArray[Any]]]:
        """What each tensor has of some rows: [panels, ...], whole panels, filled up with zeros."""
        groups = num_groups(self.num_inputs)
        values = _in_panels(found.values, groups * QUANTIZED_GROUP).reshape(-1, PANEL_OUTPUTS, groups, QUANTIZED_GROUP)
        scales = _in_panels(found.scales, groups)
        if found.zeros is not None:
            values = values[:, :, 0::2] | values[:, :, 1::2] << 4
            scales = np.stack((scales, _in_panels(found.zeros, groups)), axis=3)  # [panels, outputs, groups, 2]
            scales = scales.transpose(0, 2, 3, 1)
        else:
            scales = scales.transpose(0, 2, 1)
        names = (tensor.name for tensor in self.tensors())
        arrays = (values.transpose(0, 2, 1, 3), scales, _in_panels(found.row_scale[:, None], 1))
        yield from zip(names, map(np.ascontiguousarray, arrays), strict=True)


def stored_parts(name: str, parts: Sequence[WeightPart], num_inputs: int) -> list[StoredPart]:
    """Of a parameter. The first has its name."""
    names = [name if not part.begin else f"{name}.from_{part.begin}" for part in parts]
    return [StoredPart(each, part, num_inputs) for each, part in zip(names, parts, strict=True)]


def _in_panels(values: NDArray[Any], width: int) -> NDArray[Any]:
    """[outputs, n] as [panels, PANEL_OUTPUTS, width], filled up with zeros."""
    num_outputs, count = values.shape
    padded = np.zeros((-(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS, width), values.dtype)
    padded[:num_outputs, :count] = values
    return padded.reshape(-1, PANEL_OUTPUTS, width)
