"""`pb_utils.InferenceRequest`: what `execute` gets, and what a model makes to call another model (BLS)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import ClassVar

from llmserve.backends.python.bls import Door
from llmserve.backends.python.errors import TritonModelException
from llmserve.backends.python.responses import InferenceResponse, InferenceResponseSender, Reply
from llmserve.backends.python.tensors import Tensor
from llmserve.serving.types import InferRequest, ParameterValue

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2


class InferenceRequest:
    """Models see a subclass that knows their `door`."""

    door: ClassVar[Door]

    def __init__(
        self,
        model_name: str,
        requested_output_names: Sequence[str],
        inputs: Sequence[Tensor],
        request_id: str = "",
        correlation_id: int | str = 0,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"inputs must hold Tensors, got {type(tensor).__name__}")
        request = InferRequest(
            model_name=model_name,
            inputs={tensor.name(): tensor.to_wire() for tensor in inputs},
            model_version="" if model_version < 1 else str(model_version),
            request_id=request_id,
            requested_outputs=tuple(dict.fromkeys(requested_output_names)),
            parameters=dict(parameters or {}),
            timeout_us=timeout,
            sequence_id=correlation_id,
            sequence_start=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        )
        self._hold(request, None, request.requested_outputs)

    @classmethod
    def received(cls, request: InferRequest, reply: Reply, output_names: tuple[str, ...]) -> InferenceRequest:
        """A client's request; `output_names` are the model's."""
        self = cls.__new__(cls)
        self._hold(request, reply, request.requested_outputs or output_names)
        return self

    def _hold(self, request: InferRequest, reply: Reply | None, output_names: tuple[str, ...]) -> None:
        self._request = request
        self._reply = reply
        self._output_names = output_names
        self._inputs = {name: Tensor.borrow(tensor) for name, tensor in request.inputs.items()}
        self._sender: InferenceResponseSender | None = None

    @property
    def reply(self) -> Reply:
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
        """All outputs of the model when the client named none."""
        return list(self._output_names)

    def model_name(self) -> str:
        return self._request.model_name

    def parameters(self) -> str:
        """JSON."""
        return json.dumps(dict(self._request.parameters))

    def timeout(self) -> int:
        """Microseconds; 0: none."""
        return self._request.timeout_us

    def flags(self) -> int:
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if self._request.sequence_start else 0
        end = TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if self._request.sequence_end else 0
        return start | end

    def is_cancelled(self) -> bool:
        return self._reply is not None and self._reply.cancelled

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            self._sender = InferenceResponseSender(self.reply)
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Run the request on another model and wait. Its errors are error responses."""
        if decoupled:
            return self.door.iterate(self._request)
        return InferenceResponse.received(self.door.call(self._request).result())

    def async_exec(self, decoupled: bool = False) -> Awaitable[InferenceResponse | AsyncIterator[InferenceResponse]]:
        """The same from an `async def execute`."""
        if decoupled:
            return self._async_iterate()
        return self._async_call()

    async def _async_call(self) -> InferenceResponse:
        return InferenceResponse.received(await asyncio.wrap_future(self.door.call(self._request)))

    async def _async_iterate(self) -> AsyncIterator[InferenceResponse]:
        return self.door.iterate_async(self._request)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return request.input(name)
