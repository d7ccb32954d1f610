"""The one error tree. Front ends map `Code` to their wire; nothing else knows a status number.

LlmserveError                 code
├── InvalidArgument           INVALID_ARGUMENT    the caller's input is wrong
│   ├── PromptTooLong         INVALID_ARGUMENT    the engine has no room for the prompt
│   ├── CheckpointError       INVALID_ARGUMENT    a checkpoint folder cannot be used as it is
│   ├── RecipeError           INVALID_ARGUMENT    build options or a recipe are wrong
│   └── ModelConfigError      INVALID_ARGUMENT    a config.pbtxt or a model repository is wrong
├── NotFound                  NOT_FOUND           no such model, version, file
├── AlreadyExists             ALREADY_EXISTS
├── Unsupported               UNIMPLEMENTED       well-formed, but not something we do
├── EngineFileError           FAILED_PRECONDITION an engine directory is corrupt, foreign or from another version
├── ResourceExhausted         RESOURCE_EXHAUSTED  queue full, not enough memory
│   └── RateLimited           RESOURCE_EXHAUSTED  the client's own limit, not the server's
├── Unavailable               UNAVAILABLE         not ready, or shutting down
├── DeadlineExceeded          DEADLINE_EXCEEDED
├── Cancelled                 CANCELLED
└── InternalError             INTERNAL            our mistake, or a model's
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from enum import Enum
from typing import ClassVar, Self

from llmserve.tenant_counters import MAX_ANSWERS

MAX_PROBLEMS = 99  # the most that one error lists
MAX_COMPARED = 64  # characters of a client's name: the cost of comparing is the product of both lengths


class Code(Enum):
    """gRPC's canonical codes, by name only: the protocol-independent codes of the core."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"


class LlmserveError(Exception):
    """Base of every error that a user may see. `str(error)` says what is wrong and what to do."""

    code: ClassVar[Code] = Code.UNKNOWN

    def at(self, place: str) -> Self:
        """Returns the same error, with its location in front."""
        placed = copy.copy(self)
        placed.args = (f"{place}, {self}",)
        return placed


class InvalidArgument(LlmserveError):
    code = Code.INVALID_ARGUMENT


class PromptTooLong(InvalidArgument):
    """A prompt has `num_tokens`, more than the `limit` of an engine."""

    def __init__(self, message: str, *, num_tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.limit = limit


class CheckpointError(InvalidArgument):
    pass


class RecipeError(InvalidArgument):
    pass


class ModelConfigError(InvalidArgument):
    pass


class NotFound(LlmserveError):
    code = Code.NOT_FOUND


class AlreadyExists(LlmserveError):
    code = Code.ALREADY_EXISTS


class Unsupported(LlmserveError):
    code = Code.UNIMPLEMENTED


class EngineFileError(LlmserveError):
    code = Code.FAILED_PRECONDITION


class GateClosed(EngineFileError):
    """The engine is valid, but lacks a required record of a release gate."""


class ResourceExhausted(LlmserveError):
    code = Code.RESOURCE_EXHAUSTED


class RateLimited(ResourceExhausted):
    """`limit` is one of `tenant_counters.LIMITS`."""

    def __init__(self, message: str, *, limit: str = MAX_ANSWERS, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after_s = retry_after_s


class Unavailable(LlmserveError):
    code = Code.UNAVAILABLE


class DeadlineExceeded(LlmserveError):
    code = Code.DEADLINE_EXCEEDED


class Cancelled(LlmserveError):
    code = Code.CANCELLED


class InternalError(LlmserveError):
    code = Code.INTERNAL


def nearest(name: str, known: Collection[str]) -> str:
    """Returns a suggestion to append after an unknown `name`, or nothing, which keeps Triton's message unchanged."""
    close = get_close_matches(name, known, n=1) if len(name) <= MAX_COMPARED else ()
    return f"; did you mean '{close[0]}'?" if close else ""


def raise_problems(error: Callable[[str], LlmserveError], headline: str, problems: Sequence[str]) -> None:
    """Raises one `error` that lists the problems, up to MAX_PROBLEMS; returns if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise error(f"{headline}: {problems[0]}")
    listed = [*problems[:MAX_PROBLEMS], *([f"and {left} more"] if (left := len(problems) - MAX_PROBLEMS) > 0 else [])]
    raise error(f"{headline} ({len(problems)} problems):\n" + "\n".join(f"  - {p}" for p in listed))
