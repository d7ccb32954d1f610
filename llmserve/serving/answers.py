"""Answers to one request in a form in which those of two models can be compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from hashlib import sha256
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from llmserve.serving.types import InferRequest, InferResponse


class AnswerReader(Protocol):
    """Reads the responses to one request, in order."""

    def add(self, response: InferResponse) -> None: ...

    def answer(self) -> Hashable | None:
        """A value for the answer; equal answers have equal values. None: there is nothing to compare."""
        ...


ReadsAnswer: TypeAlias = Callable[[InferRequest], AnswerReader | None]  # None: other answers would be correct, too


class EveryOutput:
    """Reads all outputs of all responses, for a bitwise comparison."""

    def __init__(self) -> None:
        self._digest = sha256()

    def add(self, response: InferResponse) -> None:
        for tensor in sorted(response.outputs, key=lambda tensor: tensor.name):
            self._digest.update(f"{tensor.name}|{tensor.datatype}|{tensor.shape}|".encode())
            self._digest.update(_content(tensor.data))

    def answer(self) -> Hashable | None:
        return self._digest.digest()


def every_output(request: InferRequest) -> AnswerReader | None:
    return EveryOutput()


def _content(data: NDArray[Any]) -> bytes:
    if data.dtype.hasobject:
        return b"".join(len(text).to_bytes(8, "little") + text for text in data.reshape(-1).tolist())
    return data.tobytes()
