"""Parses a large JSON document in a worker thread without holding the GIL for long.

`json.loads` is one C call: it blocks all other threads, for seconds on a body of tens of megabytes. Here, Python code
walks the document, so other threads can run between any two values. Arrays of numbers, nested or not, go to the C
parser piece by piece and become compact `Numbers`: Python objects would take several times the memory, and freeing
them in one call would also take long. The number of other values is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.frontends.http.large_json_text import LargeText, Malformed
from llmserve.frontends.http.numbers import MAX_NESTING, Numbers, leaves_of
from llmserve.wire.request_memory import RequestTooLarge, Share

PairsHook: TypeAlias = Callable[[list[tuple[str, Any]]], Any]  # from the members of an object, in order, to its value
MAX_VALUES = 1024 * 1024  # other than numbers in arrays
VALUE_BYTES = 256  # most memory of a value and its place in its container: an object with one member
VALUES_AT_ONCE = 1024  # values whose memory is requested together
FEW_BYTES = 64  # longer than most arrays in a document with many arrays
MIN_RUN_BYTES = 4096  # shortest array of numbers that becomes `Numbers`
PIECE_BYTES = 16 * 1024  # less than half a millisecond of the C parser
MAX_NUMBER_BYTES = 5000  # more digits than Python reads

SPACE = re.compile(rb"[ \t\n\r]*")
NUMBER = re.compile(rb"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
OF_NUMBERS = re.compile(rb"[\[\]0-9eE+\-., \t\n\rtrufalsNnIiy]*")  # and of true, false, NaN and Infinity
BRACKET = re.compile(rb"[\[\]]")
COMMA = re.compile(rb",")
WORDS = {
    b"null": None, b"true": True, b"false": False, b"NaN": float("nan"), b"Infinity": float("inf"),
    b"-Infinity": float("-inf"),
}  # fmt: skip
WORD = re.compile(b"|".join(WORDS))
OPENING, CLOSING, QUOTE, OBJECT, OBJECT_END, COLON, SEPARATOR = b'[]"{}:,'


def loads_large(data: bytes | memoryview, share: Share, pairs_hook: PairsHook | None = None) -> Any:
    """Like `json.loads` with this `object_pairs_hook`, but long arrays of numbers become `Numbers`.

    Raises `Malformed`, `RecursionError`, other `ValueError`s for invalid UTF-8, and errors of growing `share`.
    """
    document = _Document(data, share, pairs_hook or dict)
    value, end = document.value(document.skip_space(0))
    end = document.skip_space(end)
    if end != len(data):
        raise Malformed("Extra data", end)
    return value


class _Document(LargeText):
    """Methods read the value that begins at a position, and return it with the position after it."""

    def __init__(self, data: bytes | memoryview, share: Share, make_object: PairsHook) -> None:
        super().__init__(data, share)
        self._make_object = make_object
        self._num_values = 0
        self._num_granted = 0  # values for which the share has grown
        self._no_run_before = 0  # arrays that begin before this position contain more than numbers

    def skip_space(self, at: int) -> int:
        while (match := SPACE.match(self.data, at, at + PIECE_BYTES)) is not None and match.end() > at:
            at = match.end()
        return at

    def value(self, at: int) -> tuple[Any, int]:
        self._count(1)
        first = self.byte(at)
        if first == QUOTE:
            return self.text(at + 1)
        if first == OBJECT:
            return self._object(self.skip_space(at + 1))
        if first == OPENING:
            return self._array(at)
        match = NUMBER.match(self.data, at, at + MAX_NUMBER_BYTES)
        if match is not None:
            whole, fraction, exponent = match.groups()
            number = int(whole) if not fraction and not exponent else float(match[0])
            return number, match.end()
        word = WORD.match(self.data, at, at + 16)
        if word is None:
            raise Malformed("Expecting value", at)
        return WORDS[word[0]], word.end()

    def _count(self, num_values: int) -> None:
        self._num_values += num_values
        while self._num_values > self._num_granted:
            if self._num_granted >= MAX_VALUES:
                raise RequestTooLarge(
                    f"the request has more than {MAX_VALUES} JSON values beside numbers in arrays: "
                    "use binary data for large tensors"
                )
            self.share.grow(VALUES_AT_ONCE * VALUE_BYTES)
            self._num_granted += VALUES_AT_ONCE

    def _object(self, at: int) -> tuple[Any, int]:
        """`at`: the position after the brace and white space."""
        members: list[tuple[str, Any]] = []
        if self.byte(at) == OBJECT_END:
            return self._make_object(members), at + 1
        while True:
            if self.byte(at) != QUOTE:
                raise Malformed("Expecting property name enclosed in double quotes", at)
            name, at = self.text(at + 1)
            at = self.skip_space(at)
            if self.byte(at) != COLON:
                raise Malformed("Expecting ':' delimiter", at)
            value, at = self.value(self.skip_space(at + 1))
            members.append((name, value))
            at = self.skip_space(at)
            if self.byte(at) == OBJECT_END:
                return self._make_object(members), at + 1
            if self.byte(at) != SEPARATOR:
                raise Malformed("Expecting ',' delimiter", at)
            at = self.skip_space(at + 1)

    def _array(self, at: int) -> tuple[Any, int]:
        """`at`: the position of the bracket."""
        run = self._run(at) if at >= self._no_run_before else None
        if run is not None:
            return run
        values: list[Any] = []
        at = self.skip_space(at + 1)
        if self.byte(at) == CLOSING:
            return values, at + 1
        while True:
            value, at = self.value(at)
            values.append(value)
            at = self.skip_space(at)
            if self.byte(at) == CLOSING:
                return values, at + 1
            if self.byte(at) != SEPARATOR:
                raise Malformed("Expecting ',' delimiter", at)
            at = self.skip_space(at + 1)

    def _run(self, start: int) -> tuple[Any, int] | None:
        """The array at `start`, if it and its nested arrays contain only numbers or booleans."""
        for size in (FEW_BYTES, MIN_RUN_BYTES):
            first = OF_NUMBERS.match(self.data, start, start + size)
            assert first is not None
            if (length := _end_of_array(first[0])) > 0:
                return self._short_run(first[0][:length], start)
            if first.end() < start + size:
                self._no_run_before = first.end()
                return None
        numbers, end = Numbers(self.share), start
        try:
            for piece, end in self._pieces(start):  # noqa: B007
                numbers.add(self._leaves(piece))
        except _NoRun as problem:
            self._no_run_before = problem.at
            return None
        except (ValueError, OverflowError):  # the slow path reports the problem
            self._no_run_before = end + 1
            return None
        return numbers, end

    def _short_run(self, array: bytes, start: int) -> tuple[Any, int] | None:
        try:
            values = json.loads(array)
        except ValueError:
            return None
        self._count(array.count(b",") + array.count(b"["))
        return values, start + len(array)

    def _leaves(self, array: bytes) -> list[Any]:
        """The leaves of nested arrays, in order. If one array is empty, all are counted: numbers do not limit them."""
        values: list[Any] = json.loads(array)
        num_arrays = array.count(b"[")
        if num_arrays == 1:
            return values
        try:
            leaves: list[Any] = json.loads(b"[%b]" % array.translate(None, b"[]"))
        except ValueError:
            self._count(num_arrays)
            return leaves_of(values)
        return leaves

    def _pieces(self, start: int) -> Iterator[tuple[bytes, int]]:
        """Pieces of the array at `start`, completed to documents with the brackets that they lack; and their ends."""
        at, depth = start, 0
        while True:
            piece = self._piece(at)
            depths = _depths(piece, depth)
            end = int(np.argmax(depths <= 0)) + 1 if depths.min(initial=1) <= 0 else 0
            if end > 0:
                piece = piece[:end]
            elif self.byte(at + len(piece)) != SEPARATOR:
                raise _NoRun(at + len(piece))
            stripped = piece.strip(b" \t\n\r")
            if not stripped or (depth and stripped[0] == CLOSING) or (end <= 0 and stripped[-1] == OPENING):
                raise ValueError("a comma without a value")
            if depths[: len(piece)].max() > MAX_NESTING:
                raise ValueError("nested too deep")
            before, depth = depth, int(depths[len(piece) - 1])
            yield b"[" * before + piece + b"]" * depth, at + len(piece)
            if end > 0:
                return
            at += len(piece) + 1

    def _piece(self, at: int) -> bytes:
        """Text that may belong to an array of numbers, up to a comma if there is one."""
        most = at + PIECE_BYTES
        match = OF_NUMBERS.match(self.data, at, most)
        assert match is not None
        if match.end() < most:
            return match[0]
        comma = COMMA.search(self.data, most, most + MAX_NUMBER_BYTES)
        end = comma.start() if comma is not None else most + MAX_NUMBER_BYTES
        whole = OF_NUMBERS.match(self.data, at, end)
        assert whole is not None
        return whole[0]


class _NoRun(Exception):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at


def _depths(piece: bytes, depth: int) -> NDArray[np.int64]:
    """The nesting depth after each byte of a piece that begins at `depth`."""
    codes = np.frombuffer(piece, np.uint8)
    steps = (codes == OPENING).astype(np.int8) - (codes == CLOSING).astype(np.int8)
    return depth + np.cumsum(steps, dtype=np.int64)


def _end_of_array(piece: bytes) -> int:
    """The position after the bracket that closes the first array of `piece`; 0 if that bracket is missing."""
    depth = 0
    for bracket in BRACKET.finditer(piece):
        depth += 1 if bracket[0] == b"[" else -1
        if depth <= 0:
            return bracket.end()
    return 0
