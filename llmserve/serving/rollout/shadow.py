"""Copies a request to the candidate while the stable version answers the client, which does not notice it."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from llmserve.core import EVERYBODY
from llmserve.errors import LlmserveError, RateLimited
from llmserve.serving.answers import AnswerReader
from llmserve.serving.model import ServedModel
from llmserve.serving.rollout.progress import SLOWER
from llmserve.serving.types import InferRequest, InferResponse, Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one answer, in seconds."""

    first_s: float
    total_s: float


class Stopwatch:
    """Times the responses to one request."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first_s: float | None = None
        self.timing: Timing | None = None  # set when the answer is complete
        self.error = ""
        self.is_limited = False  # by the client's own limit, which is no failure of the model

    def see(self, response: InferResponse) -> None:
        elapsed = time.monotonic() - self._began
        if response.error is not None:
            self.fail(response.error)
        elif self._first_s is None and (response.outputs or response.final):
            self._first_s = elapsed
        if response.final and not self.error and self._first_s is not None:
            self.timing = Timing(self._first_s, elapsed)

    def fail(self, error: LlmserveError) -> None:
        self.error = str(error)
        self.is_limited = isinstance(error, RateLimited)


@dataclass(frozen=True, slots=True)
class CopyOutcome:
    """The outcome of a copy. The stable version has answered the same request without an error."""

    error: str  # "": none
    timing: Timing | None
    equal: bool | None  # None: not comparable


class ShadowCopy:
    """A copy of a request, which begins at once. It owns its tensors, because the client may reuse its memory.

    After the original has ended, the copy may take three times the original's time, or `timeout_s` if that is more.
    """

    def __init__(self, stable: ServedModel, candidate: ServedModel, request: InferRequest, timeout_s: float) -> None:
        self._candidate = candidate
        self._request = copied(request)
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._deadline: float | None = None  # in the loop's time; None: its original is not answered yet
        self._patience: asyncio.Timeout | None = None  # while it runs
        self._stable_reader = stable.reads_answer(request)
        self._stable_answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run())

    def stable_said(self, response: InferResponse) -> None:
        if self._stable_reader is not None:
            self._stable_reader.add(response)

    def stable_ended(self, *, answered: bool) -> None:
        """`answered`: completely, and without an error. If not, the copy is cancelled."""
        if not answered:
            self.task.cancel()
        elif not self._stable_answered.done():
            self._stable_answered.set_result(True)
            more_s = max(self._timeout_s, SLOWER * (time.monotonic() - self._began))
            self._deadline = asyncio.get_running_loop().time() + more_s
            if self._patience is not None:
                self._patience.reschedule(self._deadline)

    async def _run(self) -> CopyOutcome:
        watch = Stopwatch()
        reader = None if self._stable_reader is None else self._candidate.reads_answer(self._request)
        error = ""
        try:
            async with asyncio.timeout_at(self._deadline) as self._patience:
                try:
                    await self._read(watch, reader)
                finally:
                    self._patience = None
            error = watch.error
        except TimeoutError:
            error = f"a copied request was not answered within {time.monotonic() - self._began:.1f} s"
        except LlmserveError as failure:
            error = str(failure)
        except Exception as failure:  # border: a candidate may raise anything
            logger.error("a candidate failed", exc_info=failure)
            error = f"{type(failure).__name__}: {failure}"
        await self._stable_answered
        return CopyOutcome(error, watch.timing, None if error else self._are_equal(reader))

    async def _read(self, watch: Stopwatch, reader: AnswerReader | None) -> None:
        async with aclosing(self._candidate.infer(self._request)) as stream:
            async for response in stream:
                watch.see(response)
                if reader is not None:
                    reader.add(response)

    def _are_equal(self, reader: AnswerReader | None) -> bool | None:
        if reader is None or self._stable_reader is None:
            return None
        mine, its = reader.answer(), self._stable_reader.answer()
        return None if its is None else mine == its


def copied(request: InferRequest) -> InferRequest:
    """The request with its own tensors, without the client's limits, deadline and trace."""
    inputs = {name: _owned(tensor) for name, tensor in request.inputs.items()}
    return replace(request, inputs=inputs, deadline=None, tenant=EVERYBODY, trace=None)


def _owned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data.flags.owndata else Tensor(tensor.name, tensor.datatype, np.array(tensor.data))
