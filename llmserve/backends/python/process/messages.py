"""Messages between the server and a model's process. The side that starts an exchange chooses its number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.backends.python.host import ModelSpec
from llmserve.serving.types import InferRequest, InferResponse

# from the server


@dataclass(frozen=True, slots=True)
class Open:
    """The first message, unless that is `Complete`."""

    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Complete:
    """Run `auto_complete_config`; answered with `Completed`, and nothing else follows."""

    file: Path
    config: bytes  # a serialized ModelConfig


@dataclass(frozen=True, slots=True)
class Execute:
    batch: int
    requests: tuple[tuple[int, InferRequest], ...]  # (line, request)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The responses of this line are no longer needed."""

    line: int


@dataclass(frozen=True, slots=True)
class CallResponse:
    call: int
    response: InferResponse | None  # None: nothing follows


@dataclass(frozen=True, slots=True)
class Answered:
    question: int
    value: Any
    error: Exception | None


@dataclass(frozen=True, slots=True)
class End:
    """Finalize after the queued batches."""


# from the model's process


@dataclass(frozen=True, slots=True)
class Opened:
    error: Exception | None
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    config: bytes
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Response:
    line: int
    response: InferResponse


@dataclass(frozen=True, slots=True)
class Done:
    batch: int


@dataclass(frozen=True, slots=True)
class Call:
    call: int
    request: InferRequest
    only_first: bool


@dataclass(frozen=True, slots=True)
class CancelCall:
    call: int


@dataclass(frozen=True, slots=True)
class Ask:
    question: int  # 0: no answer requested
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Dead:
    """The model has stopped working; its process ends."""
