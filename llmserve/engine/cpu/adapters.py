"""Packs a sealed adapter for an engine file: its matrices in panels, and the operations that they change."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.adapters.sealed import REBUILD, AdapterPart, SealedAdapter
from llmserve.engine.cpu.layout import PANEL_COLUMNS, DType, pack_panels, read_linear_weights
from llmserve.engine.native.records import AdapterPartRecord
from llmserve.errors import EngineFileError


class Output(NamedTuple):
    """Rows [begin, end) of a parameter that one operation multiplies."""

    op: int
    begin: int
    end: int


class Change(NamedTuple):
    """An addition to the outputs of one operation, from `begin` on."""

    op: int
    param: str
    begin: int
    down: NDArray[Any]  # [rank, inputs]
    up: NDArray[Any]  # [outputs, rank]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """The library's input; the records point to `arrays`."""

    records: ctypes.Array[AdapterPartRecord]
    arrays: Sequence[NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class AdapterPacker:
    """For one engine file."""

    def __init__(self, engine_file: Path) -> None:
        self._path = engine_file
        self._outputs: dict[str, list[Output]] = {}
        for op, tensor, height in read_linear_weights(engine_file):
            param, begin = _rows_of(tensor)
            self._outputs.setdefault(param, []).append(Output(op, begin, begin + height))

    def packed(self, adapter: SealedAdapter) -> PackedAdapter:
        """Raises EngineFileError for changes that the engine has no place for."""
        dtype = DType[adapter.manifest.dtype.upper()]
        changes: dict[int, list[Change]] = {}
        for part in adapter.read():
            for change in self._changes(part, adapter.path):
                changes.setdefault(change.op, []).append(change)
        records: list[AdapterPartRecord] = []
        arrays: list[NDArray[Any]] = []
        for op, of_op in sorted(changes.items()):
            of_op.sort(key=lambda change: change.begin)
            if any(one.begin + len(one.up) > other.begin for one, other in itertools.pairwise(of_op)):
                raise EngineFileError(f"adapter {adapter.path} changes rows of {of_op[0].param} twice; {REBUILD}")
            if len({change.down.shape[1] for change in of_op}) > 1:
                raise EngineFileError(f"matrices for {of_op[0].param} of adapter {adapter.path} do not fit; {REBUILD}")
            down = np.concatenate([change.down for change in of_op])
            arrays.append(pack_panels(down, dtype))
            panels, first_rank = arrays[-1].ctypes.data, 0
            for change in of_op:
                begin = change.begin - change.begin % PANEL_COLUMNS  # its first panel begins with rows of zeros
                up = np.pad(change.up, ((change.begin - begin, 0), (0, 0)))
                arrays.append(pack_panels(up, dtype))
                records.append(
                    AdapterPartRecord(
                        panels, arrays[-1].ctypes.data, op, dtype, begin, len(up), down.shape[1], up.shape[1],
                        first_rank, len(down),
                    )
                )  # fmt: skip
                first_rank += up.shape[1]
        return PackedAdapter((AdapterPartRecord * len(records))(*records), arrays)

    def _changes(self, part: AdapterPart, path: Path) -> Iterator[Change]:
        """For each operation that computes rows of a part."""
        first, last = part.shape.begin, part.shape.begin + part.shape.rows
        outputs = self._outputs.get(part.shape.param, [])
        if not outputs or last > max(output.end for output in outputs):
            raise EngineFileError(f"adapter {path} changes {part.shape.param}, which {self._path} lacks in this form")
        for output in outputs:
            begin, end = max(first, output.begin), min(last, output.end)
            if begin < end:
                up = part.up[begin - first : end - first]
                yield Change(output.op, part.shape.param, begin - output.begin, part.down, up)


def _rows_of(tensor: str) -> tuple[str, int]:
    """The parameter whose rows a tensor of an engine file has, and the first row: `name` or `name[4:8]`."""
    name, bracket, rows = tensor.partition("[")
    return name, int(rows.partition(":")[0]) if bracket else 0
