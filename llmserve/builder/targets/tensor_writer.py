"""Writes parameters to an engine file in which every tensor already has its place: rounds, packs and writes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.pieces import Weight, row_pieces
from llmserve.builder.quantization import Quantized, Scheme, quantize_rows
from llmserve.builder.targets.base import CompileJob
from llmserve.checkpoint.blocks import BlockRows


class Rows(NamedTuple):
    """A tensor of the file with rows [begin, end) of a parameter, quantized or not."""

    tensor: str
    begin: int
    end: int
    scheme: Scheme | None = None


class Part(NamedTuple):
    """A tensor and the items of it to write."""

    tensor: str
    items: NDArray[Any]  # in the order of the file
    rows: int = 1  # of each item


class Packer(Protocol):
    """Defines a target's layout of numbers."""

    def floats(self, tensor: str, values: NDArray[Any]) -> Part: ...

    def integers(self, tensor: str, found: Quantized | BlockRows) -> Iterable[Part]:
        """The values are in `tensor`; data of groups and rows is in other tensors."""


class Piece(NamedTuple):
    """Some rows of a tensor, and their source."""

    param: str
    weight: Weight
    of: Rows
    begin: int  # within the tensor
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorWriter:
    file: BinaryIO
    places: Mapping[str, int]  # tensor -> where it begins
    stored: Mapping[str, Sequence[Rows]]  # parameter -> its rows; missing if it is stored under another name
    offsets: Mapping[str, float]  # what is added to a parameter
    packer: Packer
    prepare: Callable[[int, int], None] = lambda offset, num_bytes: None  # before bytes are written

    def write_all(self, job: CompileJob, constants: Mapping[str, Any]) -> None:
        for name, values in constants.items():
            job.advance(name, self._write(Part(name, np.asarray(values, np.float32)), 0))
        for name, num_bytes in job.each(self._write_piece, self._pieces(job)):
            job.advance(name, num_bytes)

    def _pieces(self, job: CompileJob) -> Iterator[Piece]:
        for param in job.params:
            weight = job.weight(param.name)
            for of in self.stored.get(param.name, ()):
                for rows in row_pieces((of.end - of.begin, *weight.shape[1:]), of.scheme.pieces if of.scheme else 1):
                    yield Piece(param.name, weight, of, rows.start, rows.stop)

    def _write_piece(self, piece: Piece) -> tuple[str, int]:
        """Returns the tensor's name and the number of bytes."""
        tensor, begin, _, scheme = piece.of
        rows = slice(begin + piece.begin, begin + piece.end)
        if scheme is not None:
            parts = self.packer.integers(tensor, quantize_rows(scheme, piece.weight, rows))
            return tensor, sum(self._write(part, piece.begin) for part in parts)
        values, offset = piece.weight[rows], self.offsets.get(piece.param, 0.0)
        values = values.astype(np.float32) + np.float32(offset) if offset else values
        return tensor, self._write(self.packer.floats(tensor, values), piece.begin)

    def _write(self, part: Part, begin: int) -> int:
        """Write from row `begin` of the tensor on; other threads may write elsewhere. Returns the number of bytes."""
        offset = self.places[part.tensor] + begin // part.rows * part.items[0].nbytes
        self.prepare(offset, part.items.nbytes)
        write_at(self.file, offset, np.ascontiguousarray(part.items).reshape(-1).view(np.uint8).data)
        return part.items.nbytes


def write_at(file: BinaryIO, offset: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while left:
        written = os.pwrite(file.fileno(), left, offset)
        left, offset = left[written:], offset + written
