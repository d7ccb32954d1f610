"""Prevents duplicate names in JSON objects, which a grammar cannot do for names that the model chooses.

Names are compared as written, so `"a"` and `"\\u0061"` differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

QUOTE = b'"'
MAX_KEPT = 256  # names that the model has written


class QuotedTokens:
    """The tokens of a vocabulary that can end a name."""

    def __init__(self, known: Sequence[bytes | None]) -> None:
        self._sorted = sorted((text, token) for token, text in enumerate(known) if text and QUOTE in text)
        self._whole = [(text, token) for text, token in self._sorted if text.count(QUOTE) > 1]
        self.containing = lru_cache(MAX_KEPT)(self._containing)

    def beginning(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        for place in range(bisect_left(self._sorted, (text, -1)), len(self._sorted)):
            if not self._sorted[place][0].startswith(text):
                return
            yield self._sorted[place]

    def _containing(self, text: bytes) -> Sequence[tuple[bytes, int]]:
        return [each for each in self._whole if text in each[0]]


@dataclass(slots=True)
class UsedNames:
    """The names in the objects that are open at the end of a growing JSON text."""

    open: list[set[bytes] | None] = field(default_factory=list)  # None: a list
    name: bytearray = field(default_factory=bytearray)  # the current name so far, if any
    in_text: bool = False
    in_name: bool = False
    expects_name: bool = False
    is_escaped: bool = False
    has_repeated: bool = False

    def add(self, text: bytes) -> None:
        for byte in text:
            if self.in_text:
                self._add_inside(byte)
            else:
                self._add_between(byte)

    def repeating(self, tokens: QuotedTokens) -> Iterator[int]:
        """The tokens that would repeat a name."""
        used = self.open[-1] if self.open else None
        if not used or (self.in_text and not self.in_name):
            return
        for name in used:
            if not self.in_text:
                candidates: Iterator[tuple[bytes, int]] = iter(tokens.containing(QUOTE + name + QUOTE))
            elif name.startswith(self.name):
                candidates = tokens.beginning(name[len(self.name) :] + QUOTE)
            else:
                continue
            yield from (token for text, token in candidates if self._repeats_with(text))

    def _repeats_with(self, text: bytes) -> bool:
        after = self.copy()
        after.add(text)
        return after.has_repeated

    def copy(self) -> UsedNames:
        return replace(
            self, open=[None if used is None else set(used) for used in self.open], name=bytearray(self.name)
        )

    def _add_inside(self, byte: int) -> None:
        if byte == ord(QUOTE) and not self.is_escaped:
            self.in_text = False
            if self.in_name:
                self._end_name()
            return
        self.is_escaped = byte == ord("\\") and not self.is_escaped
        if self.in_name:
            self.name.append(byte)

    def _end_name(self) -> None:
        used = self.open[-1]
        assert used is not None
        self.has_repeated = self.has_repeated or bytes(self.name) in used
        used.add(bytes(self.name))
        self.in_name = False

    def _add_between(self, byte: int) -> None:
        match chr(byte):
            case '"':
                self.in_text, self.in_name, self.expects_name = True, self.expects_name, False
                self.name.clear()
            case "{":
                self.open.append(set())
                self.expects_name = True
            case "[":
                self.open.append(None)
                self.expects_name = False
            case "}" | "]":
                self.open = self.open[:-1]
                self.expects_name = False
            case ",":
                self.expects_name = bool(self.open) and self.open[-1] is not None
