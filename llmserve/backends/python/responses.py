"""`pb_utils.InferenceResponse` and how a model returns it: from `execute`, or through a sender."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from llmserve.backends.python.errors import TritonError, TritonModelException, to_server_error, to_triton_error
from llmserve.backends.python.tensors import Tensor
from llmserve.errors import InternalError, LlmserveError
from llmserve.serving.types import InferRequest, InferResponse, ParameterValue, Rescheduled

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


def checked_parameters(parameters: Mapping[str, ParameterValue] | None) -> dict[str, ParameterValue]:
    """Parameters of a request or response that a model makes."""
    for key, value in (parameters or {}).items():
        if not isinstance(key, str) or not isinstance(value, str | int | float):
            raise TritonModelException(
                f"parameters must have keys of type str and values of type bool, int, float or str, got {key!r}: "
                f"{type(value).__name__}"
            )
    return dict(parameters or {})


class InferenceResponse:
    __slots__ = ("_error", "_output_tensors", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self._output_tensors = list(output_tensors)  # None raises TypeError, as in Triton
        for tensor in self._output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"output_tensors must hold Tensors, got {type(tensor).__name__}")
        self._error = error
        self._parameters = checked_parameters(parameters)

    @staticmethod
    def received(response: InferResponse) -> InferenceResponse:
        """The answer of another model."""
        error = None if response.error is None else to_triton_error(response.error)
        return InferenceResponse([Tensor.borrow(t) for t in response.outputs], error, response.parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._output_tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def to_wire(self, reply: Responder, *, final: bool, copy: bool) -> InferResponse:
        error = None
        if self._error is not None:
            error = to_server_error(self._error if isinstance(self._error, TritonError) else TritonError(self._error))
        outputs = () if error else tuple(tensor.to_wire(copy=copy) for tensor in self._output_tensors)
        return InferResponse(
            reply.model_name, reply.model_version, reply.request_id, outputs, self._parameters, error, final
        )


class Line(Protocol):
    """The way back for one request, wherever the model runs."""

    @property
    def cancelled(self) -> bool: ...

    @property
    def shares_memory(self) -> bool:
        """Whether the server uses the arrays of requests and responses themselves."""
        ...

    def post(self, response: InferResponse) -> None:
        """Callable from any thread."""
        ...


class Responder:
    """A model's responses on a line. If it is dropped without a final response, it answers with an error."""

    __slots__ = ("_ended", "_line", "decoupled", "model_name", "model_version", "request_id")

    def __init__(self, request: InferRequest, version: str, line: Line, *, decoupled: bool) -> None:
        self.decoupled = decoupled  # any number of responses is allowed
        self.model_name = request.model_name
        self.model_version = version
        self.request_id = request.request_id
        self._line = line
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def cancelled(self) -> bool:
        return self._line.cancelled

    @property
    def shares_memory(self) -> bool:
        return self._line.shares_memory

    def send(self, response: InferenceResponse | None, *, final: bool) -> None:
        if response is None:
            answer = InferResponse(self.model_name, self.model_version, self.request_id, final=final)
        else:
            answer = response.to_wire(self, final=final, copy=self.shares_memory)
        self._post(answer)

    def reschedule(self) -> None:
        """Run the request again, unless it has ended."""
        if not self._ended:
            self._post(Rescheduled(self.model_name, self.model_version, self.request_id, final=True))

    def fail(self, error: LlmserveError) -> None:
        """End with an error, unless it has ended."""
        if not self._ended:
            self._post(InferResponse(self.model_name, self.model_version, self.request_id, error=error, final=True))

    def _post(self, answer: InferResponse) -> None:
        self._ended = answer.final
        self._line.post(answer)

    def __del__(self) -> None:
        self.fail(
            InternalError(
                f"model '{self.model_name}' dropped a request without a final response; send one with "
                "TRITONSERVER_RESPONSE_COMPLETE_FINAL"
            )
        )


class InferenceResponseSender:
    """Sends any number of responses to a request of a decoupled model, or a single one for any other model."""

    __slots__ = ("_has_answered", "_is_closed", "_reply")

    def __init__(self, reply: Responder) -> None:
        self._reply = reply
        self._has_answered = False
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if not self._reply.decoupled:
            self._check_single(response)
        if self._is_closed or (self._reply.ended and not self._has_answered):
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag: {flags}")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flag is not set to "
                "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"send takes an InferenceResponse, got {type(response).__name__}")
        self._is_closed = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if self._reply.decoupled:
            self._reply.send(response, final=self._is_closed)
        elif response is not None:  # the answer, whether or not the model marks it as final
            self._has_answered = True
            self._reply.send(response, final=True)

    def _check_single(self, response: InferenceResponse | None) -> None:
        problem = ""
        if response is not None and self._has_answered:
            problem = "Non-decoupled model cannot send more than one response."
        if response is None and not self._has_answered:
            problem = "Non-decoupled model cannot send complete final before sending a response."
        if problem:
            raise TritonModelException(f"Unable to send response. {problem}")

    def is_cancelled(self) -> bool:
        return self._reply.cancelled


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)
