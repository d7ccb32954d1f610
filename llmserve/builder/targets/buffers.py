"""Places of values while a Program runs: numbered buffers, reused as soon as their values are no longer needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

NO_BUFFER = -1
LOGITS_BUFFER = -2
ROW_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Columns [offset, offset + width) of a buffer whose rows are `stride` elements apart."""

    buffer: int
    offset: int
    width: int
    stride: int

    @property
    def record(self) -> tuple[int, int, int, int]:
        return (self.buffer, self.offset, self.width, self.stride)

    def columns(self, begin: int, end: int) -> Place:
        """Some of its columns; an empty place stays as it is."""
        return Place(self.buffer, self.offset + begin, end - begin, self.stride) if self.width else self

    def overlaps(self, other: Place) -> bool:
        apart = self.offset + self.width <= other.offset or other.offset + other.width <= self.offset
        return self.buffer == other.buffer and not apart


NOWHERE = Place(NO_BUFFER, 0, 0, 0)


class Buffers:
    """The place of each value. A buffer is free when no value in it will be read again. Strides are multiples of
    `stride_bytes`."""

    def __init__(self, uses: Counter[str], stride_bytes: int = 4) -> None:
        self.bytes_per_row: list[int] = []
        self._uses = uses
        self._stride_bytes = stride_bytes
        self._places: dict[str, Place] = {}

    def __getitem__(self, value: str) -> Place:
        return self._places[value]

    def assign(self, value: str, place: Place) -> Place:
        self._places[value] = place
        return place

    def new(self, value: str, width: int, item_bytes: int = 4) -> Place:
        """A new place, in the free buffer that wastes or grows least."""
        wanted = _round_up(width * item_bytes, ROW_ALIGNMENT)
        taken = {self._places[name].buffer for name in self._alive()}
        free = [index for index in range(len(self.bytes_per_row)) if index not in taken]
        if free:
            index = min(free, key=lambda i: (self.bytes_per_row[i] < wanted, abs(self.bytes_per_row[i] - wanted)))
            self.bytes_per_row[index] = max(self.bytes_per_row[index], wanted)
        else:
            index = len(self.bytes_per_row)
            self.bytes_per_row.append(wanted)
        stride = _round_up(width * item_bytes, self._stride_bytes) // item_bytes
        return self.assign(value, Place(index, 0, width, stride))

    def over(self, value: str, source: str) -> Place:
        """The place of `source` if this op is its last reader, else a new one."""
        place = self._places[source]
        others = (name for name in self._alive() if name != source)
        if self._uses[source] == 1 and not any(self._places[name].overlaps(place) for name in others):
            return self.assign(value, place)
        return self.new(value, place.width)

    def read(self, values: Sequence[str]) -> None:
        """Count one use of each value as done."""
        self._uses.subtract(values)

    def _alive(self) -> list[str]:
        return [name for name in self._places if self._uses[name] > 0]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
