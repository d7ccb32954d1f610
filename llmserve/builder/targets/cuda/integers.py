"""Integer weights in the layout that the kernels of `linear.py` read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.quantization import Quantized, WeightPart
from llmserve.builder.targets.tensor_writer import Part, Rows
from llmserve.checkpoint.blocks import BlockRows
from llmserve.engine.cuda.layout import PANEL_OUTPUTS, PIECE_BYTES, PlacedTensor
from llmserve.models.number_formats import INT4, INT8, INT8_ACTIVATIONS, WeightFormat

MULTIPLIED = (INT8, INT4)  # by kernels/linear.py, as FORMAT


def num_groups(num_inputs: int) -> int:
    """An even number, since two groups of four bits share their bytes."""
    return -(-INT8_ACTIVATIONS.num_groups(num_inputs) // 2) * 2


def stored_rows(name: str, parts: Sequence[WeightPart]) -> list[Rows]:
    """The stored rows of a parameter with integers. The first tensor has the parameter's name."""
    names = [name if not part.begin else f"{name}.from_{part.begin}" for part in parts]
    return [Rows(each, part.begin, part.end, part.scheme) for each, part in zip(names, parts, strict=True)]


def integer_tensors(rows: Rows, format: WeightFormat, num_inputs: int) -> tuple[PlacedTensor, ...]:
    """Tensors for values, scales, and scales of outputs.

    Values: panels of PANEL_OUTPUTS outputs; in each, for one group of inputs after the other, the first PIECE_BYTES of
    every output, then the others. Four-bit integers are stored in pairs of groups: the second group is in the upper
    halves of the bytes. Scales: in panels like values, with a number for each group and output. For eight bits, it is a
    float16. For four bits, it is a byte, the root of the scale; the zero points of the panel's outputs follow, in
    sixteenths.
    """
    outputs, groups = -(-(rows.end - rows.begin) // PANEL_OUTPUTS) * PANEL_OUTPUTS, num_groups(num_inputs)
    return (
        PlacedTensor(rows.tensor, format.values, outputs, groups * format.group * format.bits // 8),
        PlacedTensor(f"{rows.tensor}.scales", format.scales, outputs, groups * (1 + format.has_zeros)),
        PlacedTensor(f"{rows.tensor}.row_scales", "float32", 1, outputs),
    )


class Panels:
    """Packs numbers as `integer_tensors` describes: whole panels, padded with zeros."""

    def __init__(self, tensors: Sequence[PlacedTensor]) -> None:
        self._dtypes = {tensor.name: tensor.dtype for tensor in tensors}

    def floats(self, tensor: str, values: NDArray[Any]) -> Part:
        return Part(tensor, np.ascontiguousarray(values, self._dtypes[tensor]))

    def integers(self, tensor: str, found: Quantized | BlockRows) -> Iterator[Part]:
        assert isinstance(found, Quantized)
        groups, group = num_groups(found.values.shape[1]), found.format.group
        values = _in_panels(found.values, groups * group).reshape(-1, PANEL_OUTPUTS, groups, group)
        scales = _in_panels(found.scales, groups)
        if found.zeros is not None:
            values = values[:, :, 0::2] | values[:, :, 1::2] << 4
            scales = np.stack((scales, _in_panels(found.zeros, groups)), axis=3)  # [panels, outputs, groups, 2]
            scales = scales.transpose(0, 2, 3, 1)
        else:
            scales = scales.transpose(0, 2, 1)
        pieces = values.reshape(*values.shape[:3], -1, PIECE_BYTES)  # [panels, outputs, groups, pieces, bytes]
        yield Part(tensor, pieces.transpose(0, 2, 3, 1, 4), PANEL_OUTPUTS)
        yield Part(f"{tensor}.scales", scales, PANEL_OUTPUTS)
        yield Part(f"{tensor}.row_scales", _in_panels(found.row_scale[:, None], 1), PANEL_OUTPUTS)


def _in_panels(values: NDArray[Any], width: int) -> NDArray[Any]:
    """[outputs, n] as [panels, PANEL_OUTPUTS, width], padded with zeros."""
    num_outputs, count = values.shape
    padded = np.zeros((-(-num_outputs // PANEL_OUTPUTS) * PANEL_OUTPUTS, width), values.dtype)
    padded[:num_outputs, :count] = values
    return padded.reshape(-1, PANEL_OUTPUTS, width)
