"""Holds a model, in a thread of the server or in its own process: opens it, and passes batches to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from llmserve.backends.python.advice import tokenizer_advice
from llmserve.backends.python.batch import PythonBatch
from llmserve.backends.python.bls import ServerApi
from llmserve.backends.python.errors import batch_failure, describe_failure
from llmserve.backends.python.model_file import forget_model, import_model
from llmserve.backends.python.requests import InferenceRequest
from llmserve.backends.python.responses import Line, Responder
from llmserve.backends.python.tensors import Tensor
from llmserve.backends.python.utils_module import make_utils_module
from llmserve.backends.python.worker import Worker
from llmserve.errors import InternalError, LlmserveError
from llmserve.serving.backend import Execution
from llmserve.serving.types import InferRequest, InferResponse
from llmserve.wire.request_memory import RequestMemory

logger = logging.getLogger(__name__)

AS_IT_COMES = nullcontext()
# An attribute of a TritonPythonModel: a number of bytes. It declares that `execute` depends only on its requests, may
# run on several threads at once, calls no other model, and takes microseconds for inputs of at most this size.
INLINE_ATTRIBUTE = "llmserve_inline_bytes"
# A method of such a model that does the same for one request, from arrays by name to arrays by name: without the
# objects of triton_python_backend_utils, which cost more than the work on a few ids. Errors of the client are raised as
# `LlmserveError`.
ARRAYS_METHOD = "llmserve_execute_arrays"

Work: TypeAlias = Sequence[tuple[InferRequest, Line]]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything needed to open a model. Can be sent to another process."""

    instance_name: str
    model_name: str
    version: str
    file: Path
    decoupled: bool
    output_names: tuple[str, ...]
    arguments: dict[str, str]  # of `initialize`


class InlineLine:
    """The way back for a request that is answered before its call returns."""

    shares_memory = False  # nothing is copied: a pure execution neither changes nor keeps the arrays
    cancelled = False

    def __init__(self) -> None:
        self.responses: list[InferResponse] = []

    def post(self, response: InferResponse) -> None:
        self.responses.append(response)


def _check_inline_bytes(declared: object) -> None:
    if not isinstance(declared, int) or declared < 0:
        raise TypeError(f"{INLINE_ATTRIBUTE} must be a number of bytes, got {declared!r}")


def _ignore(execution: Execution) -> None:
    """The caller already knows when it is over."""


class ModelHost:
    def __init__(
        self,
        spec: ModelSpec,
        server: ServerApi,
        *,
        on_death: Callable[[], None],
        module_name: str | None = None,
        memory: RequestMemory | None = None,
    ) -> None:
        """`on_death` is called on the model's thread if it can no longer serve, although it was not asked to end.

        `module_name`: in a process without other models, the name of its file there; "": an unknown name.
        `memory`: see `PythonBatch`.
        """
        self._spec = spec
        self._memory = memory
        self._utils = make_utils_module(spec.instance_name, server, spec.file.parent)
        self._is_alone = module_name is not None
        self._module_name = module_name or f"triton_model_{spec.instance_name}_{id(self):x}"
        self._worker = Worker(spec.instance_name, self._open_model, on_death=on_death)

    @property
    def is_async(self) -> bool:
        """Known once it is open."""
        return self._worker.is_async

    def start(self) -> Future[None]:
        """Start to load the model in a thread; the future is done when the model can execute."""
        return self._worker.start()

    def run(self, on_opened: Callable[[Future[None]], None]) -> None:
        """The model's whole life, on this thread; `on_opened` is called when it can execute, or cannot be loaded."""
        self._worker.opened.add_done_callback(on_opened)
        self._worker.run()

    def submit(
        self,
        work: Work,
        on_done: Callable[[Execution], None],
        together: AbstractContextManager[None] = AS_IT_COMES,
    ) -> None:
        """Responses within one `together` should arrive at the same time."""
        request_class: type[InferenceRequest] = self._utils.InferenceRequest
        decoupled = self._spec.decoupled
        requests = [
            request_class.received(
                request, Responder(request, self._spec.version, line, decoupled=decoupled), self._spec.output_names
            )
            for request, line in work
        ]
        name, memory = self._spec.instance_name, self._memory
        self._worker.submit(PythonBatch(name, requests, on_done, together, decoupled=decoupled, memory=memory))

    @property
    def max_inline_bytes(self) -> int:
        """The number that the model declares (`INLINE_ATTRIBUTE`), while it can execute in other threads."""
        model = self._worker.model
        if model is None or self._worker.is_async or self._spec.decoupled:
            return 0
        declared: int = getattr(model, INLINE_ATTRIBUTE, 0)
        return declared

    def execute_inline(self, request: InferRequest) -> InferResponse:
        """Execute on this thread, whatever the model's own thread does."""
        model = self._worker.model
        if hasattr(model, ARRAYS_METHOD):
            return self._execute_arrays(getattr(model, ARRAYS_METHOD), request)
        line = InlineLine()
        spec = self._spec
        request_class: type[InferenceRequest] = self._utils.InferenceRequest
        received = request_class.received(
            request, Responder(request, spec.version, line, decoupled=False), spec.output_names
        )
        batch = PythonBatch(spec.instance_name, [received], _ignore, AS_IT_COMES, decoupled=False)
        batch.run(model)
        if len(line.responses) == 1 and line.responses[0].final and not received.is_rescheduled:
            return line.responses[0]
        problem = f"declares {INLINE_ATTRIBUTE}, so its execute must return one InferenceResponse for each request"
        error = InternalError(f"model instance '{spec.instance_name}' {problem}")
        return self._failed(request, error)

    def _execute_arrays(
        self, execute: Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]], request: InferRequest
    ) -> InferResponse:
        try:
            made = execute({name: tensor.data for name, tensor in request.inputs.items()})
            outputs = tuple([Tensor(name, array).to_wire(copy=False) for name, array in made.items()])
        except LlmserveError as error:
            return self._failed(request, error)
        except BaseException as error:  # border: any error that the model raises is the answer to this request only
            problem = describe_failure(error)
            logger.warning("model instance '%s': %s failed: %s", self._spec.instance_name, ARRAYS_METHOD, problem)
            return self._failed(request, batch_failure(self._spec.instance_name, problem))
        return InferResponse(self._spec.model_name, self._spec.version, request.request_id, outputs, final=True)

    def _failed(self, request: InferRequest, error: LlmserveError) -> InferResponse:
        return InferResponse(self._spec.model_name, self._spec.version, request.request_id, error=error, final=True)

    def alive(self) -> bool:
        return self._worker.alive()

    def submit_end(self) -> None:
        """Finalize after the queued batches."""
        self._worker.submit_end()

    def stop(self, timeout_s: float) -> bool:
        """`submit_end`, and wait. False if the model is still busy after `timeout_s`."""
        return self._worker.stop(timeout_s)

    def forget(self) -> None:
        forget_model(self._module_name)

    def _open_model(self) -> Any:
        model_class = import_model(self._spec.file, self._module_name, self._utils, is_alone=self._is_alone)
        try:
            model = model_class()
            _check_inline_bytes(getattr(model, INLINE_ATTRIBUTE, 0))
            if hasattr(model, "initialize"):
                model.initialize(dict(self._spec.arguments))
        except BaseException as error:  # border: sys.exit() is this model's load error, too
            self.forget()
            advice = tokenizer_advice(error, self._spec.arguments)
            problem = f"failed to initialize: {describe_failure(error, advice)}"
            raise InternalError(f"model instance '{self._spec.instance_name}' {problem}") from error
        return model
