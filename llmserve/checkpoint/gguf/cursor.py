"""Reads little-endian values from bytes that may end too early or contain false lengths."""

from __future__ import annotations

import mmap
import struct

from llmserve.errors import CheckpointError

UINT32, UINT64 = struct.Struct("<I"), struct.Struct("<Q")
MAX_STRINGS = 1 << 21  # in the whole header; the largest vocabularies have half a million tokens and merges


class Cursor:
    """`limit` is the latest end of the header; it bounds all lengths in it."""

    def __init__(self, data: mmap.mmap, limit: int) -> None:
        self._data = data
        self._limit = limit
        self._num_strings = 0
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._limit - self.position

    def bytes(self, count: int) -> bytes:
        if count > self.remaining:
            raise CheckpointError(
                f"byte {self.position} claims {count} more bytes, but the header can only have {self.remaining}: "
                "the file is cut short or damaged"
            )
        start = self.position
        self.position += count
        return self._data[start : self.position]

    def unpack(self, layout: struct.Struct) -> int | float:
        (value,) = layout.unpack(self.bytes(layout.size))
        assert isinstance(value, int | float)
        return value

    def uint32(self) -> int:
        return int(self.unpack(UINT32))

    def uint64(self) -> int:
        return int(self.unpack(UINT64))

    def count(self, what: str, smallest: int, most: int) -> int:
        """The number of items that follow, each at least `smallest` bytes long."""
        count = self.uint64()
        if count > most or count * smallest > self.remaining:
            raise CheckpointError(
                f"byte {self.position} claims {count} {what}, more than the header can have: the file is damaged"
            )
        return count

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Vocabularies have hundreds of thousands, so this is the only slow loop of a header."""
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise CheckpointError(f"the header has more than {MAX_STRINGS} strings: the file is damaged")
        data, limit, position = self._data, self._limit, self.position
        unpack, found = UINT64.unpack_from, []
        try:
            for _ in range(count):
                start = position + UINT64.size
                position = start + unpack(data, position)[0]
                if position > limit:
                    self.position = start
                    self.bytes(position - start)  # raises an error that says what is wrong
                found.append(data[start:position].decode("utf-8"))
        except struct.error:
            raise CheckpointError(f"the file is cut short at byte {position}, where a string begins") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"the string before byte {position} is not UTF-8: {error.reason}") from error
        self.position = position
        return found
