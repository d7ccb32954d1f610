"""`pb_utils.TritonError` and `TritonModelException`, and how a model's failures become the server's errors."""

from __future__ import annotations

import traceback
from typing import ClassVar

from llmserve.backends.python.advice import general_advice
from llmserve.errors import (
    AlreadyExists,
    Cancelled,
    Code,
    InternalError,
    InvalidArgument,
    LlmserveError,
    NotFound,
    Unavailable,
    Unsupported,
)


class TritonModelException(Exception):
    """A model used the API incorrectly, or fails its batch deliberately."""


class TritonError:
    """An error for one request. `code` is one of the constants."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    __slots__ = ("_code", "_message", "cause")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = code
        self.cause: LlmserveError | None = None  # one of ours that it stands for: it says more than a code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message


_ERRORS: dict[int, type[LlmserveError]] = {
    TritonError.UNKNOWN: LlmserveError,
    TritonError.INTERNAL: InternalError,
    TritonError.NOT_FOUND: NotFound,
    TritonError.INVALID_ARG: InvalidArgument,
    TritonError.UNAVAILABLE: Unavailable,
    TritonError.UNSUPPORTED: Unsupported,
    TritonError.ALREADY_EXISTS: AlreadyExists,
    TritonError.CANCELLED: Cancelled,
}
_CODES = {
    Code.INVALID_ARGUMENT: TritonError.INVALID_ARG,
    Code.NOT_FOUND: TritonError.NOT_FOUND,
    Code.ALREADY_EXISTS: TritonError.ALREADY_EXISTS,
    Code.UNIMPLEMENTED: TritonError.UNSUPPORTED,
    Code.UNAVAILABLE: TritonError.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: TritonError.UNAVAILABLE,
    Code.CANCELLED: TritonError.CANCELLED,
    Code.UNKNOWN: TritonError.UNKNOWN,
}


def to_server_error(error: TritonError) -> LlmserveError:
    return error.cause or _ERRORS.get(error.code(), InternalError)(error.message())


def to_triton_error(error: LlmserveError) -> TritonError:
    return TritonError(str(error), _CODES.get(error.code, TritonError.INTERNAL))


def describe_failure(error: BaseException, advice: str = "") -> str:
    """`ValueError: boom`, advice if there is any, and the traceback: innermost frame first, without frames of this
    package."""
    frames = [
        f"  {frame.filename}({frame.lineno}): {frame.name}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith(_OWN_CODE) and not frame.filename.startswith("<frozen")
    ]
    where = "\n\nAt:\n" + "\n".join(frames) + "\n" if frames else ""
    return f"{type(error).__name__}: {error}{general_advice(error)}{advice}{where}"


_OWN_CODE = __file__.removesuffix("errors.py")


def batch_failure(instance_name: str, problem: str) -> InternalError:
    return InternalError(f"Failed to process the request(s) for model '{instance_name}', message: {problem}")
