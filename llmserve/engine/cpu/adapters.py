"""A sealed adapter for an engine file: its matrices in panels, and the operations to whose outputs they are added."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from llmserve.engine.adapters.sealed import AdapterPart, SealedAdapter
from llmserve.engine.cpu.layout import DType, pack_panels, read_linear_weights
from llmserve.engine.native.records import AdapterPartRecord
from llmserve.errors import EngineFileError


class Output(NamedTuple):
    """Rows [begin, end) of a parameter, which one operation multiplies with."""

    op: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """What the library is given; `arrays` are what the records point into."""

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
        """Raises EngineFileError for what the engine has no place for."""
        dtype = DType[adapter.manifest.dtype.upper()]
        records: list[AdapterPartRecord] = []
        arrays: list[NDArray[Any]] = []
        for part in adapter.read():
            down = pack_panels(part.down, dtype)
            arrays.append(down)
            for output, begin, end in self._places(part, adapter.path):
                up = pack_panels(part.up[begin - part.shape.begin : end - part.shape.begin], dtype)
                arrays.append(up)
                record = AdapterPartRecord(
                    down.ctypes.data, up.ctypes.data, output.op, dtype, begin - output.begin, end - begin,
                    part.shape.columns, part.shape.rank,
                )  # fmt: skip
                records.append(record)
        return PackedAdapter((AdapterPartRecord * len(records))(*records), arrays)

    def _places(self, part: AdapterPart, path: Path) -> Iterator[tuple[Output, int, int]]:
        """Each operation that makes some of a part's rows, and which."""
        first, last = part.shape.begin, part.shape.begin + part.shape.rows
        outputs = self._outputs.get(part.shape.param, [])
        if not outputs or last > max(output.end for output in outputs):
            raise EngineFileError(f"adapter {path} changes {part.shape.param}, which {self._path} does not have so")
        for output in outputs:
            begin, end = max(first, output.begin), min(last, output.end)
            if begin < end:
                yield output, begin, end


def _rows_of(tensor: str) -> tuple[str, int]:
    """The parameter that a tensor of an engine file holds rows of, and the first of them: `name` or `name[4:8]`."""
    name, bracket, rows = tensor.partition("[")
    return name, int(rows.partition(":")[0]) if bracket else 0
