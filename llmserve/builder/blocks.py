"""Matrices that keep the blocks of a GGUF file, each in its own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.quantization import MATRICES, SCHEMES, Matrix, Quantized, Scheme, WeightPart
from llmserve.checkpoint.integers import Integers
from llmserve.checkpoint.plan import WeightPlan
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import BLOCKS, INT8, WeightFormat
from llmserve.models.spec import Param


@dataclass(frozen=True, slots=True)
class AsStored:
    """Rounds nothing: rows already are blocks of this format."""

    format: WeightFormat
    pieces: int = 1
    is_stored: bool = True

    def quantize(self, rows: Matrix, begin: int = 0) -> Quantized:
        raise AssertionError(f"{self.format.name} blocks can only be kept; nothing is rounded to this format")

    def keep(self, rows: Integers) -> tuple[Quantized, NDArray[np.bool_]] | None:
        return None


def stored_parts(
    program: Program, params: Sequence[Param], weights: WeightPlan, *, with_tables: bool
) -> Mapping[str, Sequence[WeightPart]]:
    """Matrices that have blocks, and how their rows are stored. Rows without blocks in such a matrix get eight bits."""
    matrices = {name for op in program.ops for name in op.weights[: MATRICES.get(op.kind, 0)]}
    others = {op.weights[0] for op in program.ops if op.kind is OpKind.EMBED} if with_tables else set()
    known = {param.name: param for param in params}
    found: dict[str, Sequence[WeightPart]] = {}
    for name in known:
        if (name in matrices and known[name].quantizable) or name in others:
            types = weights.rows(name, "float32").block_types
            if any(kind for _, _, kind in types):
                found[name] = [WeightPart(_scheme(kind), begin, end) for begin, end, kind in types]
    return found


def _scheme(kind: str) -> Scheme:
    return AsStored(BLOCKS[kind]) if kind in BLOCKS else SCHEMES[INT8.name]
