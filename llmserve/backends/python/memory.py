"""What executing takes of the memory that requests may take together (`--request-memory`), where the model says it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from llmserve.backends.python.requests import InferenceRequest
from llmserve.errors import ResourceExhausted
from llmserve.wire.request_memory import Share

# A method of a TritonPythonModel: bytes that `execute` takes for one request at most, of its arrays by name.
MEMORY_METHOD = "llmserve_memory"


def admitted(model: Any, requests: list[InferenceRequest], share: Share) -> list[InferenceRequest]:
    """Those for which there is memory; the others are told why not. `execute` takes one after the other, so `share`
    grows to what the largest takes."""
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
