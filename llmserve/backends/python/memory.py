"""Counts the memory of executions in the memory of all requests (`--request-memory`), if the model declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from llmserve.backends.python.requests import InferenceRequest
from llmserve.errors import ResourceExhausted
from llmserve.wire.request_memory import Share

# A method of a TritonPythonModel: the most bytes that `execute` needs for one request, given its arrays by name.
MEMORY_METHOD = "llmserve_memory"


def admitted(model: Any, requests: list[InferenceRequest], share: Share) -> list[InferenceRequest]:
    """The requests for which there is memory; the others receive an error. `execute` runs one after the other, so
    `share` grows to the largest need."""
    needed: Callable[[Mapping[str, NDArray[Any]]], int] | None = getattr(model, MEMORY_METHOD, None)
    if needed is None:
        return requests
    found = []
    for request in requests:
        try:
            num_bytes = needed({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            share.grow(max(0, num_bytes - share.num_bytes))
        except ResourceExhausted as error:
            request.reply.fail(error)
        else:
            found.append(request)
    return found
