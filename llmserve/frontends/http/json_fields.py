"""Typed access to a JSON document from a client.

Shape errors (bad JSON, a missing member, a wrong type) are INTERNAL in this protocol, so clients see status 500 with a
text that names the member: that is the contract, although 400 would be the better answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import InternalError, InvalidArgument
from llmserve.frontends.http.bodies import INLINE_BYTES
from llmserve.frontends.http.large_json import check_encodable, loads_large
from llmserve.frontends.shared.raw_tensors import object_array
from llmserve.serving.types import NUMPY_DTYPES, ParameterValue

Json: TypeAlias = Any  # what `json.loads` returns

MAX_NESTING = 100
ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
PIECE_VALUES = 16 * 1024  # converted in one call, which holds the interpreter lock


def parse_json(body: bytes) -> Json:
    """The document in `body`; NaN and Infinity are accepted as bare words.

    A body over `INLINE_BYTES` is parsed more slowly and so that other threads can run: call from a worker thread.
    """
    large = len(body) > INLINE_BYTES
    try:
        text = body.decode("utf-8")
        document = loads_large(text) if large else json.loads(text)
        if "\\u" in text:  # an unpaired surrogate escape is a string that has no UTF-8 form
            check_encodable(document)
    except json.JSONDecodeError as error:
        raise InternalError(f"failed to parse the request JSON buffer: {error.msg} at {error.pos}") from error
    except ValueError as error:  # not UTF-8, unpaired surrogates, or an integer of thousands of digits
        raise InternalError(f"failed to parse the request JSON buffer: {error}") from error
    except RecursionError as error:
        raise InternalError("failed to parse the request JSON buffer: it is nested too deeply") from error
    return document


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
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
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


def flatten(data: Json) -> list[Json]:
    """The leaves of a nested array, in order; a scalar is one leaf. Nesting need not be regular."""
    leaves: list[Json] = []
    stack: list[Any] = [iter([data])]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                if len(stack) > MAX_NESTING:
                    unparsable("data", f"nested deeper than {MAX_NESTING} levels")
                stack.append(iter(item))
                break
            leaves.append(item)
        else:
            stack.pop()
    return leaves


def tensor_values(leaves: Sequence[Json], datatype: str) -> NDArray[Any]:
    """A flat array of the tensor's type; integers are accepted where floats are wanted, nothing else is converted."""
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "BYTES":
        return object_array([as_string(leaf, "data").encode("utf-8") for leaf in leaves])
    if datatype == "BOOL":
        return np.array([as_bool(leaf, "data") for leaf in leaves], dtype=dtype)
    expected, accepted = _number_types(dtype)
    if not {type(leaf) for leaf in leaves} <= accepted:
        wrong_type("data", expected)
    try:
        with np.errstate(over="ignore"):  # a number too large for FP32 is infinite, as in C++
            starts = range(0, max(len(leaves), 1), PIECE_VALUES)
            return np.concatenate([np.array(leaves[start : start + PIECE_VALUES], dtype=dtype) for start in starts])
    except OverflowError:
        wrong_type("data", expected)


def _number_types(dtype: np.dtype[Any]) -> tuple[str, set[type]]:
    if dtype.kind == "f":
        return "number", {int, float}
    return ("signed-integer" if dtype.kind == "i" else "unsigned-integer"), {int}
