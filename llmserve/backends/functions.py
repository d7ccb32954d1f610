"""Instances of models that are functions of arrays, such as TorchScript and ONNX: one call per batch.

Each instance has its own thread. Arrays have the form of `serving.types.Tensor.data`. Threads are daemons, so a model
that hangs does not block the server or its shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmserve.errors import InternalError, LlmserveError, Unavailable, Unsupported
from llmserve.serving.backend import Execution, LoadContext, Released
from llmserve.serving.collation import Collator
from llmserve.serving.config.sequence_batching import implicit_inputs, implicit_outputs
from llmserve.serving.signature import datatype_name
from llmserve.serving.streams import Outbox, ResponseStream
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, InferResponse, Tensor

FINISH_TIMEOUT_S = 5.0

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

logger = logging.getLogger(__name__)


class TensorFunction(Protocol):
    def __call__(self, inputs: Arrays) -> Arrays:
        """Returns every declared output. Called on the instance's thread; must not change or keep its inputs."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    requests: Sequence[InferRequest]
    streams: Sequence[ResponseStream]
    on_done: Released | None = None

    def done(self, execution: Execution) -> None:
        if self.on_done is not None:
            self.on_done(execution)


class FunctionInstance:
    def __init__(self, name: str, context: LoadContext, function: TensorFunction) -> None:
        self.name = name
        self._model_name: str = context.config.name
        self._version = context.version
        self._collator = Collator(context.config)
        self._datatypes = output_datatypes(context.config)
        self._function = function
        self._outbox: Outbox | None = None
        self._last_batch: _Batch | None = None
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"model-{name}", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        if not self._thread.is_alive():
            raise Unavailable(f"model instance '{self.name}' has been unloaded")
        if self._outbox is None:
            self._outbox = Outbox(asyncio.get_running_loop())
        streams = [ResponseStream() for _ in requests]
        self._last_batch = _Batch(requests, streams)
        self._inbox.put(self._last_batch)
        return streams

    def when_released(self, callback: Released) -> None:
        assert self._last_batch is not None
        self._last_batch.on_done = callback
        self._last_batch = None

    def healthy(self) -> bool:
        return self._thread.is_alive()

    def abandon(self) -> None:
        """Release the thread without waiting, because the model will not be used."""
        self._inbox.put(None)

    async def close(self) -> None:
        self.abandon()
        await asyncio.to_thread(self._thread.join, FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("model instance '%s' is still busy after %g s: abandoned", self.name, FINISH_TIMEOUT_S)

    def _serve(self) -> None:
        while (batch := self._inbox.get()) is not None:
            assert self._outbox is not None
            wanted = [pair for pair in zip(batch.requests, batch.streams, strict=True) if not pair[1].closed]
            began_ns = time.monotonic_ns()
            answers = self._answers([request for request, _ in wanted]) if wanted else []
            execution = Execution(began_ns, time.monotonic_ns())
            with self._outbox:
                self._outbox.put(partial(batch.done, execution))  # first: who has an answer finds it counted
                for (_, stream), answer in zip(wanted, answers, strict=True):
                    self._outbox.put(partial(stream.push, answer))
            del batch  # so that nothing it refers to stays in memory until the next one

    def _answers(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        try:
            return self._run(requests)
        except BaseException as error:  # border: any error that the model raises is its answer
            if len(requests) > 1:  # the faulty request must not fail the others
                return [answer for request in requests for answer in self._answers([request])]
            return [self._failed(requests[0], error)]

    def _run(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        batch = self._collator.collate(requests)
        outputs = self._tensors(self._function({name: tensor.data for name, tensor in batch.inputs.items()}))
        return [
            InferResponse(self._model_name, self._version, request.request_id, part, final=True)
            for request, part in zip(requests, batch.split(outputs), strict=True)
        ]

    def _tensors(self, outputs: Arrays) -> tuple[Tensor, ...]:
        return tuple(self._tensor(name, datatype, outputs[name]) for name, datatype in self._datatypes.items())

    def _tensor(self, name: str, datatype: str, array: NDArray[Any]) -> Tensor:
        if array.dtype != NUMPY_DTYPES[datatype]:
            raise InternalError(
                f"model '{self._model_name}' returned output '{name}' of type {array.dtype}, but its config says "
                f"{datatype}"
            )
        return Tensor(name, datatype, array)

    def _failed(self, request: InferRequest, error: BaseException) -> InferResponse:
        if not isinstance(error, LlmserveError):
            logger.warning("model instance '%s' failed: %s: %s", self.name, type(error).__name__, error)
            error = InternalError(f"model '{self._model_name}' failed: {type(error).__name__}: {error}")
        return InferResponse(self._model_name, self._version, request.request_id, error=error, final=True)


def input_datatypes(config: ModelConfig) -> dict[str, str]:
    """Every input tensor of the function, including those from `batch_input` and sequences: name -> datatype."""
    derived = [(name, one.data_type) for one in config.batch_input for name in one.target_name]
    declared = [(tensor.name, tensor.data_type) for tensor in config.input]
    return {
        **{name: datatype_name(data_type) for name, data_type in (*declared, *derived)},
        **implicit_inputs(config),
    }


def output_datatypes(config: ModelConfig) -> dict[str, str]:
    """Every output tensor of the function, including the state of sequences: name -> KServe's datatype."""
    return {
        **{output.name: datatype_name(output.data_type) for output in config.output},
        **implicit_outputs(config),
    }


def instance_devices(config: ModelConfig) -> list[tuple[str, int]]:
    """(name, GPU number or -1 for the CPU) of every instance."""
    devices = []
    for group in config.instance_group:
        gpus = (list(group.gpus) or [0]) if group.kind == ModelInstanceGroup.KIND_GPU else [-1]
        devices += [(f"{group.name}_{index}", gpus[index % len(gpus)]) for index in range(group.count)]
    return devices


@contextmanager
def needs_package(config: ModelConfig, package: str, *, extra: str) -> Iterator[None]:
    """Wraps the import of a module that imports `package`; if it is missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise Unsupported(
            f"model '{config.name}': backend '{config.backend}' needs the package {package}, which is not installed: "
            f"pip install 'llmserve[{extra}]'"
        ) from None
