"""Reads the strings of a large JSON document. One string may be most of the document."""

from __future__ import annotations

import codecs
import json
import re
from typing import NoReturn

from llmserve.wire.request_memory import Share

SPECIAL = re.compile(rb'["\\\x00-\x1f]')
UNITS = re.compile(rb'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')  # characters and whole escapes
HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
ESCAPE_BYTES = 6  # of \uXXXX
ESCAPE = ord("\\")
TEXT_PIECE_BYTES = 64 * 1024


class Malformed(ValueError):
    """Malformed JSON, with `msg` and `pos` as in `json.JSONDecodeError`."""

    def __init__(self, msg: str, pos: int) -> None:
        super().__init__(f"{msg} at {pos}")
        self.msg = msg
        self.pos = pos


class LargeText:
    """A document as bytes; positions are byte offsets. It grows `share` by the size of its strings."""

    def __init__(self, data: bytes | memoryview, share: Share) -> None:
        self.data = data
        self.share = share
        self._num_uncounted = 0  # bytes that are not counted yet

    def byte(self, at: int) -> int:
        """The byte at a position; -1 after the end."""
        return self.data[at] if at < len(self.data) else -1

    def text(self, start: int) -> tuple[str, int]:
        """The string that begins at `start`, after its quote, and the position after the closing quote."""
        first = SPECIAL.search(self.data, start, start + TEXT_PIECE_BYTES)
        if first is not None and first[0] == b'"':  # most strings are short and have no escapes
            self._count_bytes(first.start() - start)
            return str(self.data[start : first.start()], "utf-8"), first.end()
        pieces: list[str] = []
        decoder = codecs.getincrementaldecoder("utf-8")()
        at = start
        while self.byte(at) != ord('"'):
            raw = self._units(at, start)
            self._count_bytes(len(raw))
            at += len(raw)
            plain = decoder.decode(raw)
            if "\\" in plain:
                plain = json.loads(f'"{plain}"')
                plain.encode("utf-8")  # raises for an unpaired surrogate escape, which has no UTF-8 form
            pieces.append(plain)
        pieces.append(decoder.decode(b"", final=True))
        return "".join(pieces), at + 1

    def _count_bytes(self, size: int) -> None:
        self._num_uncounted += size
        if self._num_uncounted > TEXT_PIECE_BYTES:
            self.share.grow(2 * self._num_uncounted)  # once for the string, and once for a tensor
            self._num_uncounted = 0

    def _units(self, at: int, start: int) -> bytes:
        match = UNITS.match(self.data, at, at + TEXT_PIECE_BYTES)
        assert match is not None
        raw = match[0]
        if not raw:
            self._refuse(at, start)
        if len(raw) > ESCAPE_BYTES and HIGH_SURROGATE.fullmatch(raw[-ESCAPE_BYTES:]):
            before = raw[: 1 - ESCAPE_BYTES]
            if (len(before) - len(before.rstrip(b"\\"))) % 2:  # else the backslash is itself escaped
                return raw[:-ESCAPE_BYTES]  # the other half of the pair follows
        return raw

    def _refuse(self, at: int, start: int) -> NoReturn:
        if self.byte(at) == ESCAPE and self.byte(at + 1) == ord("u"):
            raise Malformed("Invalid \\uXXXX escape", at + 1)
        if self.byte(at) == ESCAPE and self.byte(at + 1) >= 0:
            raise Malformed("Invalid \\escape", at)
        if 0 <= self.byte(at) < ord(" "):
            raise Malformed("Invalid control character at", at)
        raise Malformed("Unterminated string starting at", start - 1)
