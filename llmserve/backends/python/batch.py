"""The requests of one `execute` call, run on the model's own thread, and checks of its responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from llmserve.backends.python.errors import TritonModelException, batch_failure, describe_failure
from llmserve.backends.python.memory import admitted
from llmserve.backends.python.requests import InferenceRequest
from llmserve.backends.python.responses import InferenceResponse, Responder
from llmserve.errors import Cancelled
from llmserve.serving.backend import Execution
from llmserve.wire.request_memory import RequestMemory

logger = logging.getLogger(__name__)


class _WrongAnswer(Exception):
    """`execute` returned something other than its requests need."""


class PythonBatch:
    def __init__(
        self,
        instance_name: str,
        requests: list[InferenceRequest],
        on_done: Callable[[Execution], None],
        together: AbstractContextManager[None],
        *,
        decoupled: bool,
        memory: RequestMemory | None = None,
    ) -> None:
        """`on_done` is called on the model's thread when `execute` is over, within `together` with what that returns.

        It says when `execute` began and ended. `memory`: among which what that takes is counted.
        """
        self._instance_name = instance_name
        self._requests = requests
        self._on_done = on_done
        self._together = together
        self._began_ns = 0
        self._decoupled = decoupled
        self._memory = memory

    def run(self, model: Any) -> None:
        requests, self._requests = self._requests, []  # requests that the model drops must end here
        self._began_ns = time.monotonic_ns()
        if all(request.is_cancelled() for request in requests):  # while they were queued
            self._end(requests, error=Cancelled("the request was cancelled before it ran"))
            return
        share = None if self._memory is None else self._memory.share()
        try:
            if share is not None:
                requests = admitted(model, requests, share)
            answers = model.execute(requests) if requests else []
            if asyncio.iscoroutine(answers):  # from an `async def` that a decorator hides
                answers = asyncio.get_event_loop().run_until_complete(answers)
        except BaseException as error:  # border: any error that the model raises is the answer to this batch only
            self._end(requests, error=error)
        else:
            self._end(requests, answers)
        finally:
            if share is not None:
                share.release()

    async def run_async(self, model: Any) -> None:
        requests, self._requests = self._requests, []
        self._began_ns = time.monotonic_ns()
        try:
            answers = await model.execute(requests)
        except BaseException as error:  # border: any error that the model raises is the answer to this batch only
            self._end(requests, error=error)
        else:
            self._end(requests, answers)

    def _end(self, requests: list[InferenceRequest], answers: Any = None, error: BaseException | None = None) -> None:
        """Answer with what `execute` returned or raised."""
        execution = Execution(self._began_ns, time.monotonic_ns())
        with self._together:
            try:
                if error is None:
                    self._settle(requests, answers)
                else:
                    self._fail(requests, error)  # raised here, it would keep itself and the requests alive
            except BaseException as failure:  # border: as above
                self._fail(requests, failure)
            finally:
                self._on_done(execution)

    def _settle(self, requests: list[InferenceRequest], answers: Any) -> None:
        """Requests with a response sender need no answer."""
        self._check(requests, answers)
        for request, answer in zip(requests, answers or [None] * len(requests), strict=True):
            if request.is_rescheduled:
                request.reply.reschedule()
            elif not self._decoupled and not (answer is None and request.has_sender):
                self._answer(request.reply, answer)

    def _check(self, requests: list[InferenceRequest], answers: Any) -> None:
        if self._decoupled:
            if answers is not None:
                raise _WrongAnswer(
                    f"Python model '{self._instance_name}' is using the decoupled mode and the execute function must "
                    "return None."
                )
        elif answers is None and all(request.has_sender or request.is_rescheduled for request in requests):
            return
        elif not isinstance(answers, list | tuple):
            raise _WrongAnswer(f"Expected a list in the execute return, found type '{type(answers)}'.")
        elif len(answers) != len(requests):
            raise _WrongAnswer(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}\n"
            )
        else:
            for request, answer in zip(requests, answers, strict=True):
                if request.is_rescheduled and answer is not None:  # it would run again forever
                    raise _WrongAnswer(
                        "Expected a None object in the execute function return list for reschduled request, found type "
                        f"'{type(answer)}'."  # the misspelling is Triton's
                    )

    def _answer(self, reply: Responder, answer: Any) -> None:
        if not isinstance(answer, InferenceResponse):
            problem = (
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(answer)}'."
            )
            reply.fail(batch_failure(self._instance_name, problem))
            return
        try:
            reply.send(answer, final=True)
        except TritonModelException as error:
            reply.fail(batch_failure(self._instance_name, str(error)))

    def _fail(self, requests: list[InferenceRequest], error: BaseException) -> None:
        if isinstance(error, Cancelled):
            for request in requests:
                request.reply.fail(error)
            return
        problem = str(error) if isinstance(error, _WrongAnswer) else describe_failure(error)
        logger.warning("model instance '%s': execute failed: %s", self._instance_name, problem)
        for request in requests:
            request.reply.fail(batch_failure(self._instance_name, problem))
