"""Typed access to a JSON document from a client.

Structural errors (bad JSON, a missing member, a wrong type) are INTERNAL in this protocol. Clients see status 500 with
a text that names the member. That is the contract, although 400 would be the better status.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InternalError, InvalidArgument
from llmserve.frontends.http.large_json import loads_large
from llmserve.frontends.http.large_json_text import Malformed
from llmserve.frontends.http.numbers import MAX_NESTING, Numbers, leaves_of
from llmserve.frontends.shared.raw_tensors import Raw, object_array
from llmserve.frontends.shared.request_parameters import is_unsigned
from llmserve.serving.types import NUMPY_DTYPES, ParameterValue
from llmserve.wire.request_memory import Share

Json: TypeAlias = Any  # what `json.loads` returns

ZERO = re.compile(rb"\0")
PARSED_AT_ONCE = 256 * 1024  # bytes: a few milliseconds of `json.loads`
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
PIECE_VALUES = 16 * 1024  # values converted in one call, which holds the GIL


class Repeating(dict[str, Any]):
    """An object with repeated members: the last value of each, and the names of repeated ones in order."""

    repeated: tuple[str, ...] = ()


def _noting_repeats(members: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(members)
    if len(document) == len(members):
        return document
    repeating, seen = Repeating(document), set[str]()
    repeated = []
    for name, _ in members:
        if name in seen:
            repeated.append(name)
        seen.add(name)
    repeating.repeated = tuple(repeated)
    return repeating


def parse_json(body: Raw, share: Share, *, notes_repeats: bool = False) -> Json:
    """The document in `body`. NaN and Infinity are accepted as bare words. A zero byte ends the document, because
    binary tensors may follow that the client forgot to announce.

    `notes_repeats`: objects with repeated members are `Repeating`. A body over `PARSED_AT_ONCE` is parsed in a slower
    way that lets other threads run, so call this from a worker thread. Long arrays of numbers in such a body become
    `Numbers`, and `share` grows.
    """
    try:
        body = body.partition(b"\0")[0] if isinstance(body, bytes) else _before_zero(body)
        hook = _noting_repeats if notes_repeats else None
        if len(body) > PARSED_AT_ONCE:
            return loads_large(body, share, hook)
        text = str(body, "utf-8")
        document = json.loads(text, object_pairs_hook=hook)
        if "\\u" in text:
            _check_encodable(document)
    except (json.JSONDecodeError, Malformed) as error:
        raise InternalError(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from error
    except ValueError as error:  # not UTF-8, unpaired surrogates, or an integer of thousands of digits
        raise InternalError(f"failed to parse the request JSON buffer: {error}") from error
    except RecursionError as error:
        raise InternalError("failed to parse the request JSON buffer: it is nested too deeply") from error
    return document


def _before_zero(body: memoryview) -> memoryview:
    for start in range(0, len(body), PARSED_AT_ONCE):
        if (zero := ZERO.search(body, start, start + PARSED_AT_ONCE)) is not None:
            return body[: zero.start()]
    return body


def _check_encodable(document: Json) -> None:
    """Raises `UnicodeEncodeError` if a string has no UTF-8 form (unpaired surrogate escapes)."""
    for piece in ENCODER.iterencode(document):
        piece.encode("utf-8")


def encode_json(document: Json) -> bytes:
    return ENCODER.encode(document).encode("utf-8", errors="replace")


def unparsable(member: str, problem: str) -> NoReturn:
    raise InternalError(f"Unable to parse '{member}': {problem}")


def wrong_type(member: str, expected: str) -> NoReturn:
    unparsable(member, f"attempt to access JSON non-{expected} as {expected}")


def as_object(value: Json, member: str) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        wrong_type(member, "object")
    return value


def as_array(value: Json, member: str) -> Sequence[Json]:
    if not isinstance(value, list):
        wrong_type(member, "array")
    return value


def as_string(value: Json, member: str) -> str:
    if not isinstance(value, str):
        wrong_type(member, "string")
    return value


def as_unsigned(value: Json, member: str) -> int:
    if not is_unsigned(value):
        wrong_type(member, "unsigned-integer")
    return value


def as_bool(value: Json, member: str) -> bool:
    if not isinstance(value, bool):
        wrong_type(member, "boolean")
    return value


def required(document: Mapping[str, Json], member: str) -> Json:
    if member not in document:
        unparsable(member, f"attempt to access non-existing object member '{member}'")
    return document[member]


def parameter_value(name: str, value: Json) -> ParameterValue:
    if isinstance(value, str | bool | int | float):
        return value
    raise InvalidArgument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def flatten(data: Json) -> list[Json] | Numbers:
    """The leaves of a nested array, in order; a scalar is one leaf. Nesting need not be regular."""
    if isinstance(data, Numbers):
        return data
    try:
        return leaves_of(data)
    except ValueError:
        unparsable("data", f"JSON nesting depth exceeds maximum allowed limit ({MAX_NESTING})")


def tensor_values(leaves: Sequence[Json] | Numbers, datatype: str) -> NDArray[Any]:
    """A flat array of the tensor's type; integers are accepted for floats; nothing else is converted."""
    dtype = NUMPY_DTYPES[datatype]
    if isinstance(leaves, Numbers):
        return _tensor_of(leaves, dtype)
    if datatype == "BYTES":
        if not all(isinstance(leaf, str) for leaf in leaves):
            _wrong_text()
        return object_array([leaf.encode("utf-8") for leaf in leaves])
    if datatype == "BOOL":
        return np.array([as_bool(leaf, "data") for leaf in leaves], dtype=dtype)
    expected, accepted = _number_types(dtype)
    if not {type(leaf) for leaf in leaves} <= accepted:
        _wrong_number(expected)
    try:
        with np.errstate(over="ignore"):  # a number too large for FP32 is infinite, as in C++
            starts = range(0, max(len(leaves), 1), PIECE_VALUES)
            return np.concatenate([np.array(leaves[start : start + PIECE_VALUES], dtype=dtype) for start in starts])
    except OverflowError:
        _wrong_number(expected)


def _wrong_text() -> NoReturn:
    raise InternalError("Unable to parse JSON bytes array: attempt to access JSON non-string as string")


def _wrong_number(expected: str) -> NoReturn:
    found = "number" if expected == "double" else expected
    unparsable("data", f"attempt to access JSON non-{found} as {expected}")


def _tensor_of(numbers: Numbers, dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype == np.object_:
        _wrong_text()
    if dtype == np.bool_:
        return numbers.array(dtype) if numbers.kinds <= {bool} else wrong_type("data", "boolean")
    expected, accepted = _number_types(dtype)
    if not numbers.kinds <= accepted:
        _wrong_number(expected)
    try:
        return numbers.array(dtype)
    except OverflowError:
        _wrong_number(expected)


def _number_types(dtype: np.dtype[Any]) -> tuple[str, set[type]]:
    if dtype.kind == "f":
        return "double", {int, float}
    return ("signed-integer" if dtype.kind == "i" else "unsigned-integer"), {int}
