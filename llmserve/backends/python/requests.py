"""`pb_utils.InferenceRequest`: the argument of `execute`, and how a model calls another model (BLS)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import ClassVar

from llmserve.backends.python.bls import Cancel, ResponseIterator, ServerApi, call_single
from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.responses import InferenceResponse, InferenceResponseSender, Responder, checked_parameters
from llmserve.backends.python.tensors import Tensor
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.types import InferRequest, ParameterValue

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class PreferredMemory:
    """Where a model prefers the answer of another model. Only CPU memory is supported."""

    TRITONSERVER_MEMORY_GPU: ClassVar[int] = 0
    TRITONSERVER_MEMORY_CPU: ClassVar[int] = 1

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request; a model can pass it to its own requests."""

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace

    def child(self) -> Trace | None:
        """For a request that the model makes."""
        return None if self._trace is None else self._trace.child()

    def get_context(self) -> str | None:
        """W3C's trace context as a JSON object, for the model's requests elsewhere; None: no spans are recorded."""
        if self._trace is None or self._trace.ids_of_span is None:
            return None
        return json.dumps({"traceparent": self._trace.ids_of_span.traceparent})


class InferenceRequest:
    """Models use a subclass that can reach the server."""

    server: ClassVar[ServerApi]

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        if inputs is None or requested_output_names is None or not model_name:
            raise TypeError("InferenceRequest requires inputs, requested_output_names and model_name")
        if not isinstance(model_name, str) or not isinstance(request_id, str):
            raise TypeError("model_name and request_id must be str")
        requested_output_names = list(requested_output_names)
        if not all(isinstance(name, str) for name in requested_output_names):
            raise TypeError("requested_output_names must hold str")
        if not all(isinstance(number, int) for number in (model_version, flags, timeout)):
            raise TypeError("model_version, flags and timeout must be int")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"inputs must hold Tensors, got {type(tensor).__name__}")
        request = InferRequest(
            model_name=model_name,
            inputs={tensor.name(): tensor.to_wire() for tensor in inputs},
            model_version="" if model_version < 1 else str(model_version),
            request_id=request_id,
            requested_outputs=tuple(dict.fromkeys(requested_output_names)),
            parameters=checked_parameters(parameters),
            timeout_us=timeout,
            sequence_id=correlation_id,
            trace=None if trace is None else trace.child(),
        )
        self._hold(request, None, request.requested_outputs, flags)

    @classmethod
    def received(cls, request: InferRequest, reply: Responder, output_names: tuple[str, ...]) -> InferenceRequest:
        """A client's request; `output_names` are the model's outputs."""
        self = cls.__new__(cls)
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if request.sequence_start else 0
        end = TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if request.sequence_end else 0
        self._hold(request, reply, request.requested_outputs or output_names, start | end)
        return self

    def _hold(self, request: InferRequest, reply: Responder | None, output_names: tuple[str, ...], flags: int) -> None:
        self._request = request
        self._reply = reply
        self._output_names = output_names
        self._flags = flags
        adopt = Tensor.borrow if reply is None or reply.shares_memory else Tensor.own
        self._inputs = {name: adopt(tensor) for name, tensor in request.inputs.items()}
        self.is_rescheduled = False  # the model requested a reschedule
        self._sender: InferenceResponseSender | None = None
        self._begun: list[Cancel] = []

    @property
    def reply(self) -> Responder:
        if self._reply is None:
            raise TritonModelException("this request was made by the model itself and has no response sender")
        return self._reply

    @property
    def has_sender(self) -> bool:
        return self._sender is not None

    def input(self, name: str) -> Tensor | None:
        return self._inputs.get(name)

    def inputs(self) -> list[Tensor]:
        return list(self._inputs.values())

    def request_id(self) -> str:
        return self._request.request_id

    def correlation_id(self) -> int | str:
        return self._request.sequence_id

    def requested_output_names(self) -> list[str]:
        """All outputs of the model if the client named none."""
        return list(self._output_names)

    def model_name(self) -> str:
        return self._request.model_name

    def parameters(self) -> str:
        """As JSON."""
        return json.dumps(dict(self._request.parameters))

    def timeout(self) -> int:
        """Microseconds; 0: none."""
        return self._request.timeout_us

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self._request.trace)

    def is_cancelled(self) -> bool:
        return self._reply is not None and self._reply.cancelled

    def cancel(self) -> None:
        """Cancel what `exec` or `async_exec` started."""
        for cancel in self._begun:
            cancel()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            self._sender = InferenceResponseSender(self.reply)
        return self._sender

    def set_release_flags(self, flags: int) -> None:
        """What happens to the request when `execute` returns: it is released, or runs again."""
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"Unsupported release flag: {flags}")
        self.is_rescheduled = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """Run the request on another model and wait. Errors are error responses."""
        return self._iterate() if decoupled else self._call().result()

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | ResponseIterator]:
        """The same from an `async def execute`. It starts at once, not when it is awaited.

        For a decoupled model, it is done after the first response.
        """
        if not decoupled:
            return asyncio.wrap_future(self._call())
        return asyncio.get_running_loop().create_task(self._iterate().begun())

    def _call(self) -> Future[InferenceResponse]:
        answer, cancel = call_single(self.server, self._to_server())
        self._begun.append(cancel)
        return answer

    def _iterate(self) -> ResponseIterator:
        responses = ResponseIterator(self.server, self._to_server())
        self._begun.append(responses.stop)
        return responses

    def _to_server(self) -> InferRequest:
        return replace(
            self._request,
            sequence_start=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(self._flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        )


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return request.input(name)
