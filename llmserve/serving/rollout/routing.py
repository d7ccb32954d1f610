"""Chooses the version that answers a request without a version, during a rollout.

The version is chosen once, when a request comes in, and all steps of an ensemble use that choice: each name that leads
to the model has two plans, one with the stable version and one with the candidate. A canary request without a response
can still be answered by the stable version: this happens if the candidate fails, takes too long, or is rolled back. A
request that exceeds the limit of the client's API key is refused, and counts for neither version: without a rollout,
one engine would run all of the client's requests, so it would have refused this one, too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from llmserve.errors import LlmserveError, RateLimited, Unavailable
from llmserve.serving.instruments.model_statistics import RequestTiming
from llmserve.serving.model import ServedModel
from llmserve.serving.rollout.shadow import ShadowCopy, Stopwatch, Timing
from llmserve.serving.types import InferRequest, InferResponse


class Watch(Protocol):
    """Decides about requests, and is told their outcomes."""

    @property
    def canary_share(self) -> float: ...
    @property
    def first_response_limit_s(self) -> float: ...
    def watches(self, request: InferRequest) -> bool:
        """Whether the rollout applies to a request. Others are answered as without a rollout."""
        ...

    def for_candidate(self, request: InferRequest) -> InferRequest: ...
    def copy_of(self, request: InferRequest) -> ShadowCopy | None:
        """The copy of a request; None: it is not copied."""
        ...

    def stable_ended(self, watch: Stopwatch) -> None: ...
    def candidate_timed(self, timing: Timing) -> None: ...
    def canary_succeeded(self) -> None: ...
    def canary_failed(self, error: str, *, rescued: bool) -> None:
        """`rescued`: the stable version has answered."""
        ...

    def canary_left(self, waited_s: float) -> None:
        """A client left, or its deadline expired. `waited_s`: its wait for a missing first response, else 0."""
        ...

    def waiting(self, patience: asyncio.Timeout, *, begins: bool) -> None:
        """A request begins or stops to wait for a candidate's first response."""
        ...


class _WatchedStep:
    """A version that is timed, by itself or as a step of ensembles."""

    runs_inline = False

    def __init__(self, model: ServedModel, watch: Watch) -> None:
        self._model = model
        self._watch = watch

    def infer_inline(self, request: InferRequest, ensemble_timing: RequestTiming) -> InferResponse | None:
        return None


class StableStep(_WatchedStep):
    """The stable version. Some of its requests are copied to the candidate, too."""

    async def infer(
        self, request: InferRequest, ensemble_timing: RequestTiming | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        stopwatch = Stopwatch()
        copy = self._watch.copy_of(request)
        try:
            async with aclosing(self._model.infer(request, ensemble_timing)) as stream:
                async for response in stream:
                    stopwatch.see(response)
                    if copy is not None:
                        copy.stable_said(response)
                    yield response
        except LlmserveError as failure:
            stopwatch.fail(failure)
            raise
        finally:
            if copy is not None:
                copy.stable_ended(answered=stopwatch.timing is not None)
            self._watch.stable_ended(stopwatch)


class CandidateStep(_WatchedStep):
    """The candidate, which answers canary requests."""

    async def infer(
        self, request: InferRequest, ensemble_timing: RequestTiming | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        request = self._watch.for_candidate(request)
        stopwatch = Stopwatch()
        try:
            async with aclosing(self._model.infer(request, ensemble_timing)) as stream:
                async for response in stream:
                    stopwatch.see(response)
                    yield response
        finally:
            if stopwatch.timing is not None:
                self._watch.candidate_timed(stopwatch.timing)


class Answering(Protocol):
    """A model or an ensemble that can answer a whole request."""

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]: ...


class Split:
    """Splits the requests to one name between both versions."""

    def __init__(
        self,
        *,
        stable: Answering,
        candidate: Answering,
        unwatched: Callable[[], Answering],
        watch: Watch,
        chance: random.Random,
    ) -> None:
        """`unwatched`: returns the served model, for requests outside the rollout and for those that failed on the
        candidate. It does not count or copy them."""
        self._stable = stable
        self._candidate = candidate
        self._unwatched = unwatched
        self._watch = watch
        self._chance = chance
        self._of_stable: Counter[tuple[str, str]] = Counter()  # running requests, by tenant and the client's id
        self._of_candidate: Counter[tuple[str, str]] = Counter()

    def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        if not self._watch.watches(request):
            return self._unwatched().infer(request)
        return self._canary(request) if self._is_canary(request) else self._plain(self._stable, request)

    def _is_canary(self, request: InferRequest) -> bool:
        """Whether the candidate answers. Sequences stay with the stable version. A request with the id of a running one
        goes to the same version, because it may be meant to stop that one."""
        share = self._watch.canary_share
        if request.request_id and self._of_candidate[request.tenant_request_id]:
            return True
        if not share or request.sequence_id or (request.request_id and self._of_stable[request.tenant_request_id]):
            return False
        return self._chance.random() < share

    async def _plain(self, model: Answering, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        self._of_stable[request.tenant_request_id] += 1
        try:
            async with aclosing(model.infer(request)) as stream:
                async for response in stream:
                    yield response
        finally:
            _less(self._of_stable, request.tenant_request_id)

    async def _canary(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        began = time.monotonic()
        failure: LlmserveError | None = None
        has_begun = is_told = False  # is_told: the watch knows the outcome, or `_rescue` will tell it
        self._of_candidate[request.tenant_request_id] += 1
        try:
            async with aclosing(self._candidate.infer(request)) as stream:
                response, error = await self._first(stream)
                has_begun, is_told = response is not None, response is None
                while response is not None:
                    failure = response.error or failure
                    if response.final:  # the reader may not come back
                        is_told = True
                        self._ended(failure)
                    yield response
                    response = await self._following(stream)
        except LlmserveError as raised:  # no rescue: the client has the beginning of this answer
            is_told = True
            self._ended(raised)
            raise
        finally:
            _less(self._of_candidate, request.tenant_request_id)
            if not is_told:
                self._watch.canary_left(0.0 if has_begun else time.monotonic() - began)
        if not has_begun:
            async with aclosing(self._rescue(request, error)) as responses:
                async for response in responses:
                    yield response

    def _ended(self, failure: LlmserveError | None) -> None:
        if failure is None:
            self._watch.canary_succeeded()
        elif not isinstance(failure, RateLimited):
            self._watch.canary_failed(str(failure), rescued=False)

    async def _first(self, stream: AsyncGenerator[InferResponse, None]) -> tuple[InferResponse | None, str]:
        """The candidate's first response, or why there is none. Raises `RateLimited` by the client's own limit."""
        limit_s = self._watch.first_response_limit_s
        try:
            async with asyncio.timeout(limit_s) as patience:
                self._watch.waiting(patience, begins=True)
                try:
                    first = await anext(stream, None)
                finally:
                    self._watch.waiting(patience, begins=False)
        except TimeoutError:
            return None, f"no response within {limit_s:.1f} s"
        except RateLimited:
            raise
        except LlmserveError as failure:
            return None, str(failure)
        except Exception as failure:  # border: a candidate may raise anything
            return None, f"{type(failure).__name__}: {failure}"
        if first is None:
            return None, "no response"
        is_answer = first.error is None or isinstance(first.error, RateLimited)
        return (first, "") if is_answer else (None, str(first.error))

    async def _following(self, stream: AsyncGenerator[InferResponse, None]) -> InferResponse | None:
        limit_s = self._watch.first_response_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await anext(stream, None)
        except TimeoutError:
            raise Unavailable(f"the candidate sent nothing for {limit_s:.1f} s") from None

    async def _rescue(self, request: InferRequest, error: str) -> AsyncGenerator[InferResponse, None]:
        """The stable version's answer. If that is an error, too, the candidate's error does not count."""
        is_told = False
        async with aclosing(self._plain(self._unwatched(), request)) as responses:
            async for response in responses:
                if not is_told and response.error is None:
                    self._watch.canary_failed(error, rescued=True)
                is_told = True
                yield response


def _less(counts: Counter[tuple[str, str]], request_id: tuple[str, str]) -> None:
    counts[request_id] -= 1
    if not counts[request_id]:
        del counts[request_id]
