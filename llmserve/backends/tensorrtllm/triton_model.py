"""The engine behind a `TritonPythonModel`: the `tensorrt_llm` step of an exported repository in a real Triton server.

The process has one engine, on an event loop in its own thread. `execute` only hands requests over, so that every
request joins the running batch; answers are sent through the response senders. Triton does not report disconnected
clients, so it is polled for all open requests every CANCELLATION_PERIOD_S.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

from llmserve.backends.tensorrtllm.backend import TensorrtLlmBackend
from llmserve.backends.tensorrtllm.triton_gauges import TritonGauges
from llmserve.engine.open import open_engine
from llmserve.errors import InternalError, LlmserveError, Unsupported
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from llmserve.stages.shim import triton_code

CANCELLATION_PERIOD_S = 0.1  # as cancellation_check_period_ms of TensorRT-LLM's own backend
GAUGES_PERIOD_S = 0.5
CLOSE_TIMEOUT_S = 30

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineModel:
    """The implementation of `TritonPythonModel`. `utils`: the server's module triton_python_backend_utils."""

    config: ModelConfig
    version: str
    loaded: LoadedModel
    utils: Any
    _datatypes: Mapping[str, str] = field(init=False)
    _open: dict[asyncio.Task[None], Any] = field(default_factory=dict)  # -> response sender
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _thread: threading.Thread = field(init=False)

    @classmethod
    def open(cls, args: Mapping[str, str], utils: Any) -> EngineModel:
        """`args`: what Triton passes to `initialize`."""
        config = json_format.ParseDict(json.loads(args["model_config"]), ModelConfig(), ignore_unknown_fields=True)
        if not config.model_transaction_policy.decoupled:
            raise Unsupported(f"model '{config.name}' must have model_transaction_policy {{ decoupled: true }}")
        _place(config, args)
        model_dir, version = Path(args["model_repository"]), args["model_version"]
        context = LoadContext(config, model_dir, version, model_dir / version, infer=_calls_no_models)
        return cls(config, version, TensorrtLlmBackend(open_engine).load(context), utils)

    def __post_init__(self) -> None:
        self._datatypes = {tensor.name: _datatype(tensor.data_type) for tensor in self.config.input}
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmserve-engine", daemon=True)
        self._thread.start()
        self._spawn(self._watch_for_cancellation())
        self._spawn(self._export_gauges())

    def start(self, requests: Sequence[Any]) -> None:
        """Returns at once; every request is answered through its response sender."""
        for request in requests:
            self._spawn(self._serve(self._read(request), request.get_response_sender()))

    def healthy(self) -> bool:
        return self.loaded.instances[0].healthy()

    def close(self) -> None:
        """Open requests end with an error; then the engine's memory is freed."""
        self._spawn(self._finish()).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _finish(self) -> None:
        await self.loaded.instances[0].close()
        if self._open:
            await asyncio.wait(self._open)
        watchers = asyncio.all_tasks() - {asyncio.current_task()}
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def _read(self, request: Any) -> InferRequest:
        """Copies, because the server frees its memory when the request has ended."""
        inputs = {
            tensor.name(): Tensor(tensor.name(), self._datatypes[tensor.name()], np.array(tensor.as_numpy()))
            for tensor in request.inputs()
        }
        return InferRequest(
            self.config.name,
            inputs,
            model_version=self.version,
            request_id=request.request_id(),
            requested_outputs=tuple(request.requested_output_names()),
        )

    async def _serve(self, request: InferRequest, sender: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = sender
        is_final = False
        (stream,) = self.loaded.instances[0].execute([request])
        try:
            async with aclosing(stream):
                async for response in stream:
                    self._send(sender, response)
                    is_final = response.final
        except asyncio.CancelledError:
            logger.debug("request %s was cancelled by its client", request.request_id)
        except Exception as error:  # border: whatever happens, the client must get a final response
            logger.exception("request %s failed", request.request_id)
            failure = InternalError(f"{type(error).__name__}: {error}")
            self._send(sender, InferResponse(self.config.name, self.version, error=failure, final=True))
            is_final = True
        finally:
            del self._open[task]
            if not is_final:
                sender.send(flags=self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, sender: Any, response: InferResponse) -> None:
        flags = self.utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if response.final else 0
        if response.error is None and not response.outputs:
            sender.send(flags=flags)
            return
        tensors = [self.utils.Tensor(tensor.name, _writeable(tensor.data)) for tensor in response.outputs]
        error = None if response.error is None else self._triton_error(response.error)
        sender.send(self.utils.InferenceResponse(tensors, error), flags=flags)

    def _triton_error(self, error: LlmserveError) -> Any:
        return self.utils.TritonError(str(error), getattr(self.utils.TritonError, triton_code(error)))

    async def _watch_for_cancellation(self) -> None:
        while True:
            await asyncio.sleep(CANCELLATION_PERIOD_S)
            waiting = dict(self._open)
            if waiting:  # each check is a message to the server and back
                for task in await asyncio.to_thread(_cancelled, waiting):
                    task.cancel()

    async def _export_gauges(self) -> None:
        gauges = TritonGauges(self.utils, {"model": self.config.name, "version": self.version})
        while True:
            await asyncio.to_thread(gauges.export, self.loaded.gauges())
            await asyncio.sleep(GAUGES_PERIOD_S)


def _place(config: ModelConfig, args: Mapping[str, str]) -> None:
    """An instance is a process with its own engine, on the GPU of the config that it was assigned."""
    del config.instance_group[:]
    if args["model_instance_kind"] == "GPU":
        device = int(args["model_instance_device_id"])
        config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, gpus=[device])


def _cancelled(senders: Mapping[asyncio.Task[None], Any]) -> list[asyncio.Task[None]]:
    return [task for task, sender in senders.items() if sender.is_cancelled()]


def _writeable(array: NDArray[Any]) -> NDArray[Any]:
    """Shared response arrays are read-only here, but a server may do anything with its tensors."""
    return array if array.flags.writeable else array.copy()


def _datatype(number: int) -> str:
    """KServe's name of a config's data type."""
    name = str(DataType.Name(number)).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


async def _calls_no_models(request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    raise InternalError(f"the engine called the model '{request.model_name}'")
    yield
