"""Bytes that are nearly right: well-formed ones, and what becomes of them when pieces are damaged, moved or cut off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from llmserve.serving.types import NUMPY_DTYPES

LIMITS = [number.to_bytes(size, "little", signed=True) for size in (1, 2, 4, 8) for number in (0, 1, -1, 127, -128)]
EDGES = [
    *LIMITS, b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\n", b"\r\n", b"\0", b'"', b"{", b"[" * 64, b"\xc3\x28",
    b"9" * 30,
]  # fmt: skip
NUMBERS = st.integers(-3, 70) | st.sampled_from(
    [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30],
)
SCALARS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=6), st.sampled_from(["X", "F32", *NUMPY_DTYPES])
)


def any_json(names: Sequence[str]) -> st.SearchStrategy[Any]:
    """Documents whose members have these names."""
    keys = st.sampled_from(names)
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6),
        max_leaves=20,
    )


def encoded(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


@st.composite
def edited(draw: st.DrawFn, document: Any, names: Sequence[str]) -> Any:
    """A document of which some members have another value, another place, or are gone."""
    if isinstance(document, dict):
        done = {key: draw(edited(value, names)) for key, value in document.items() if draw(st.integers(0, 30))}
        if not draw(st.integers(0, 20)):
            done[draw(st.sampled_from(names))] = draw(any_json(names))
        return done
    if not draw(st.integers(0, 12)):
        return draw(any_json(names))
    if isinstance(document, list):
        return [draw(edited(value, names)) for value in document if draw(st.integers(0, 20))]
    return document


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes], at_most: int = 4) -> bytes:
    """Up to `at_most` pieces overwritten, put in, taken out, repeated, or the end cut off."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, at_most))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 8) | st.integers(0, max(0, len(data) - at)))
        piece = draw(st.sampled_from(EDGES) | st.binary(max_size=8))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + len(piece)] = piece
            case 1:
                data[at:at] = piece
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = data[at : at + size] * draw(st.integers(1, 3))
            case _:
                del data[at:]
    return bytes(data)
