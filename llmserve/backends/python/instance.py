"""One instance of a Python model: batches go to its thread, responses come back to the loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from llmserve.backends.python.bls import Door
from llmserve.backends.python.errors import TritonModelException, batch_failure, describe_failure
from llmserve.backends.python.model_file import forget_model, import_model
from llmserve.backends.python.requests import InferenceRequest
from llmserve.backends.python.responses import InferenceResponse, Reply
from llmserve.backends.python.utils_module import make_utils_module
from llmserve.backends.python.worker import Worker
from llmserve.errors import InternalError, Unavailable
from llmserve.serving.backend import LoadContext
from llmserve.serving.proto_json import message_to_dict
from llmserve.serving.streams import Outbox, ResponseStream
from llmserve.serving.types import InferRequest, InferResponse

FINALIZE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class _WrongAnswer(Exception):
    """What `execute` returned is not what its requests need."""


class PythonBatch:
    """The requests of one `execute`. Runs on the model's thread; `on_done` is called on the loop when it is over."""

    def __init__(
        self, instance_name: str, requests: list[InferenceRequest], outbox: Outbox, *, decoupled: bool
    ) -> None:
        self.on_done: Callable[[], None] | None = None
        self._instance_name = instance_name
        self._requests = requests
        self._outbox = outbox
        self._decoupled = decoupled

    def run(self, model: Any) -> None:
        requests, self._requests = self._requests, []  # what the model drops must end here
        try:
            self._settle(requests, model.execute(requests))
        except BaseException as error:  # border: whatever the model raises is the answer of this batch alone
            self._fail(requests, error)
        finally:
            self._outbox.put(self.release)

    async def run_async(self, model: Any) -> None:
        requests, self._requests = self._requests, []
        try:
            self._settle(requests, await model.execute(requests))
        except BaseException as error:  # border: whatever the model raises is the answer of this batch alone
            self._fail(requests, error)
        finally:
            self._outbox.put(self.release)

    def release(self) -> None:
        """Say that it is over, once."""
        on_done, self.on_done = self.on_done, None
        if on_done is not None:
            on_done()

    def _settle(self, requests: list[InferenceRequest], answers: Any) -> None:
        if self._decoupled:
            if answers is not None:
                raise _WrongAnswer(
                    f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
                    "return None."
                )
            return
        if answers is None and all(request.has_sender for request in requests):
            return
        if not isinstance(answers, list | tuple):
            raise _WrongAnswer(f"Expected a list in the execute return, found type '{type(answers).__name__}'.")
        if len(answers) != len(requests):
            raise _WrongAnswer(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}"
            )
        for request, answer in zip(requests, answers, strict=True):
            if not (answer is None and request.has_sender):
                self._answer(request.reply, answer)

    def _answer(self, reply: Reply, answer: Any) -> None:
        if not isinstance(answer, InferenceResponse):
            problem = (
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(answer).__name__}'."
            )
            reply.fail(batch_failure(self._instance_name, problem))
            return
        try:
            reply.send(answer, final=True)
        except TritonModelException as error:
            reply.fail(batch_failure(self._instance_name, str(error)))

    def _fail(self, requests: list[InferenceRequest], error: BaseException) -> None:
        problem = str(error) if isinstance(error, _WrongAnswer) else describe_failure(error)
        logger.warning("model instance '%s': execute failed: %s", self._instance_name, problem)
        for request in requests:
            request.reply.fail(batch_failure(self._instance_name, problem))


class PythonInstance:
    def __init__(self, name: str, context: LoadContext) -> None:
        self.name = name
        self._context = context
        self._decoupled = bool(context.config.model_transaction_policy.decoupled)
        self._output_names = tuple(output.name for output in context.config.output)
        self._module_name = f"triton_model_{name}_{id(self):x}"
        self._door = Door()
        self._utils = make_utils_module(name, self._door)
        self._worker = Worker(name, self._open_model, on_death=self._report_death)
        self._outbox: Outbox | None = None
        self._streams: set[ResponseStream] = set()  # that have no final response yet
        self._last_batch: PythonBatch | None = None
        self._busy_with: PythonBatch | None = None  # what occupies the instance, or did so last

    def start(self) -> Future[None]:
        """Begin to load the model in its thread; done when it can execute."""
        return self._worker.start()

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        if not self._worker.alive():
            raise self._died()
        loop = asyncio.get_running_loop()
        if self._outbox is None:
            self._outbox = Outbox(loop)
            self._door.open(self._context.infer, loop)
        streams = [ResponseStream() for _ in requests]
        self._streams.update(streams)
        request_class: type[InferenceRequest] = self._utils.InferenceRequest
        received = [
            request_class.received(
                request, Reply(request, self._context.version, stream, self._post), self._output_names
            )
            for request, stream in zip(requests, streams, strict=True)
        ]
        self._last_batch = PythonBatch(self.name, received, self._outbox, decoupled=self._decoupled)
        self._worker.submit(self._last_batch)
        return streams

    def when_released(self, callback: Callable[[], None]) -> None:
        assert self._last_batch is not None
        if self._decoupled and self._worker.is_async:
            asyncio.get_running_loop().call_soon(callback)  # its coroutines run side by side
        else:
            self._last_batch.on_done = callback
            self._busy_with = self._last_batch
        self._last_batch = None

    def healthy(self) -> bool:
        return self._worker.alive()

    def abandon(self) -> None:
        """Let the thread go without waiting: the model is not used after all."""
        self._worker.submit_end()
        forget_model(self._module_name)

    async def close(self) -> None:
        finished = await asyncio.to_thread(self._worker.stop, FINALIZE_TIMEOUT_S)
        if not finished:
            logger.warning("model instance '%s' is still busy after %g s: left behind", self.name, FINALIZE_TIMEOUT_S)
        forget_model(self._module_name)
        self._end_streams(Unavailable(f"model instance '{self.name}' has been unloaded"))

    def _report_death(self) -> None:
        """On the model's thread. No batch can be on its way before there is an outbox."""
        if self._outbox is not None:
            self._outbox.put(self._end_everything)

    def _end_everything(self) -> None:
        """What the thread had still to do is answered, and what waits for the instance need not wait."""
        self._end_streams(self._died())
        if self._busy_with is not None:
            self._busy_with.release()

    def _died(self) -> Unavailable:
        return Unavailable(f"model instance '{self.name}' has stopped working; restart the server")

    def _end_streams(self, error: Unavailable) -> None:
        for stream in list(self._streams):
            self._deliver(
                stream, InferResponse(self._context.config.name, self._context.version, error=error, final=True)
            )

    def _post(self, stream: ResponseStream, response: InferResponse) -> None:
        """From any thread."""
        assert self._outbox is not None
        self._outbox.put(partial(self._deliver, stream, response))

    def _deliver(self, stream: ResponseStream, response: InferResponse) -> None:
        if stream not in self._streams:
            return  # it has ended already, with the instance
        stream.push(response)
        if response.final:
            self._streams.discard(stream)

    def _open_model(self) -> Any:
        filename = self._context.config.default_model_filename
        model_class = import_model(self._context.version_dir / filename, self._module_name, self._utils)
        try:
            model = model_class()
            if hasattr(model, "initialize"):
                model.initialize(self._arguments())
        except BaseException as error:  # border: also sys.exit() is this model's load error
            forget_model(self._module_name)
            problem = describe_failure(error)
            raise InternalError(f"model instance '{self.name}' failed to initialize: {problem}") from error
        return model

    def _arguments(self) -> dict[str, str]:
        config = self._context.config
        return {
            "model_config": json.dumps(message_to_dict(config)),
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
            "model_instance_name": self.name,
            "model_repository": str(self._context.model_dir),
            "model_version": self._context.version,
            "model_name": config.name,
        }
