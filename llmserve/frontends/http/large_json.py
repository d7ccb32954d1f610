"""Parsing a large JSON document in a worker thread without holding the interpreter lock for long.

`json.loads` is one C call: in whatever thread it runs, nothing else does, for seconds on a body of tens of megabytes.
Here Python's own scanner walks the document, which lets other threads run between any two values, and only long runs of
scalars go to the C parser, a piece at a time.
"""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable, Iterator
from json.decoder import JSONArray  # type: ignore[attr-defined]  # public by name, not in the type stubs
from typing import Any, TypeAlias

PairsHook: TypeAlias = Callable[[list[tuple[str, Any]]], Any]  # members of an object, in order, to its value
MIN_ARRAY_CHARS = 64  # of shorter arrays the Python scanner is the faster one
PIECE_CHARS = 64 * 1024  # a millisecond or two of the C parser


def loads_large(text: str, pairs_hook: PairsHook | None = None) -> Any:
    """What `json.loads` returns and raises."""
    return _Decoder(pairs_hook).decode(text)


def check_encodable(document: Any) -> None:
    """`UnicodeEncodeError` when a string of the document has no UTF-8 form (unpaired surrogate escapes)."""
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(document):
        piece.encode("utf-8")


class _Decoder(json.JSONDecoder):
    """`json.JSONDecoder` with its Python scanner, and arrays of scalars in pieces."""

    def __init__(self, pairs_hook: PairsHook | None) -> None:
        super().__init__(object_pairs_hook=pairs_hook)
        self.parse_array = _parse_array
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # as above


def _parse_array(text_and_start: tuple[str, int], scan_once: Callable[[str, int], Any]) -> tuple[list[Any], int]:
    text, start = text_and_start
    end = text.find("]", start)
    if end - start < MIN_ARRAY_CHARS or any(text.find(mark, start, end) >= 0 for mark in '"[{'):
        parsed: tuple[list[Any], int] = JSONArray(text_and_start, scan_once)
        return parsed
    values: list[Any] = []
    for first, last in _pieces(text, start, end):
        try:
            piece = json.loads(f"[{text[first:last]}]")
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(error.msg, text, first + error.pos - 1) from error
        if not piece and (first, last) != (start, end):
            raise json.JSONDecodeError("Expecting value", text, last)
        values += piece
    return values, end + 1


def _pieces(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of about `PIECE_CHARS` between commas."""
    while True:
        comma = text.find(",", min(start + PIECE_CHARS, end), end)
        if comma < 0:
            yield start, end
            return
        yield start, comma
        start = comma + 1
