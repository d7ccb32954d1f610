"""Separates the request parameters that the server reads from the others, which go to the model.

`sequence_id`, `sequence_start`, `sequence_end`, `priority` and `timeout` become fields of the request; every name that
starts with `triton_` is reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, TypeGuard

from llmserve.errors import InvalidArgument, Unsupported
from llmserve.serving.types import ParameterValue

MAX_PARAMETERS = 1024  # of a request: they are sorted on the event loop, and warnings list each of them

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
# parameters of tensors
REGION, OFFSET, BYTE_SIZE = "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"
CLASSES = "classification"
MAX_UINT64 = 2**64 - 1
MAX_SEQUENCE_ID = 128  # characters


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The parameters of one request: those that the server reads, and `custom` ones for the model."""

    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    custom: Mapping[str, ParameterValue] = field(default_factory=dict)


NO_PARAMETERS = RequestParameters()


class WrongType(Protocol):
    """Raises a protocol's error for a parameter of the wrong type."""

    def __call__(self, name: str, expected: str) -> NoReturn: ...


def sort_parameters(
    values: Mapping[str, ParameterValue], wrong_type: WrongType, allowed: str = ""
) -> RequestParameters:
    """Check the types of the parameters that the server reads, and separate them from the others.

    Every `triton_` name in `values` is an error. Its text ends with `allowed`, a sentence on allowed names.
    """
    if len(values) > MAX_PARAMETERS:
        raise InvalidArgument(f"the request has {len(values)} parameters, more than {MAX_PARAMETERS}")
    custom: dict[str, ParameterValue] = {}
    sequence_id: int | str = 0
    flags = {"sequence_start": False, "sequence_end": False}
    numbers = {"priority": 0, "timeout": 0}
    for name, value in values.items():
        if name.startswith("triton_"):
            reserved = "parameter keys starting with 'triton_' are reserved for Triton usage"
            raise InvalidArgument(f"{reserved}. {allowed}" if allowed else f"{reserved} and should not be specified.")
        if name == "sequence_id":
            sequence_id = _sequence_id(value, wrong_type)
        elif name in flags:
            if not isinstance(value, bool):
                wrong_type(name, "bool_param")
            flags[name] = value
        elif name in numbers:
            if not is_unsigned(value):
                wrong_type(name, "int64_param or uint64_param" if name == "priority" else "int64_param")
            numbers[name] = int(value)
        else:
            custom[name] = value
    return RequestParameters(
        sequence_id=sequence_id or 0,
        sequence_start=flags["sequence_start"],
        sequence_end=flags["sequence_end"],
        priority=numbers["priority"],
        timeout_us=numbers["timeout"],
        custom=custom,
    )


def _sequence_id(value: ParameterValue, wrong_type: WrongType) -> int | str:
    if isinstance(value, str):
        if len(value) > MAX_SEQUENCE_ID:
            raise Unsupported(f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID} characters")
        return value
    if not is_unsigned(value):
        wrong_type("sequence_id", "int64_param or string_param")
    return int(value)


def is_unsigned(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_UINT64
