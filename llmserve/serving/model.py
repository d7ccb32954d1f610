"""One loaded version of a model: its config, its scheduler, its statistics.

Every request to the model passes through `infer`: checks, statistics, and the border at which a backend's exception
becomes an error response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.core import Allowance, Tenant
from llmserve.errors import Cancelled, InternalError, LlmserveError, RateLimited, ResourceExhausted
from llmserve.serving.answers import AnswerReader
from llmserve.serving.backend import Adapters, GaugeSample, InlineInstance, LoadedModel
from llmserve.serving.config.labels import Labels
from llmserve.serving.instruments.latencies import Histogram
from llmserve.serving.instruments.model_statistics import FailureReason, ModelStatistics, RequestTiming
from llmserve.serving.schedulers.base import ModelScheduler, Rejected, SequenceError
from llmserve.serving.schedulers.inline import fits_inline
from llmserve.serving.schedulers.loop_turn import LoopTurn
from llmserve.serving.signature import ModelSignature
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outcome:
    """The outcome of one request, as known so far."""

    failure: FailureReason | None = None
    is_final: bool = False
    is_limited: bool = False  # by the client's own limit, which is no failure of the model

    @property
    def reason(self) -> str:
        """Why the request has failed, or would have failed if it ended now; "": it has succeeded."""
        if self.failure is None:
            return "" if self.is_final else FailureReason.CANCELED.value
        return self.failure.value


class ServedModel:
    def __init__(
        self,
        config: ModelConfig,
        version: str,
        *,
        signature: ModelSignature,
        statistics: ModelStatistics,
        scheduler: ModelScheduler,
        loaded: LoadedModel,
        parts: Sequence[ServedModel] = (),
        inline: InlineInstance | None = None,
        turn: LoopTurn | None = None,
        load_s: float = 0.0,
    ) -> None:
        """`parts` are the models of an ensemble's steps; `inline` executes brief requests without the scheduler."""
        self.name: str = config.name
        self.version = version
        self.config = config
        self.signature = signature
        self.statistics = statistics
        self._scheduler = scheduler
        self._loaded = loaded
        self._parts = parts
        self._inline = inline
        self._turn = turn or LoopTurn()
        self._passes_responses = bool(parts) and not signature.reshapes_outputs  # an ensemble's need no conversion
        self._decoupled = self.decoupled
        self.load_s = load_s  # duration of its load; an ensemble loads nothing
        self._num_holds = 0
        self._unused: asyncio.Event | None = None  # set when no request runs; None: nobody waits
        self.labels: Labels = {}

    @property
    def num_pending(self) -> int:
        return self._scheduler.num_pending

    @property
    def decoupled(self) -> bool:
        return bool(self.config.model_transaction_policy.decoupled)

    @property
    def missing_outputs(self) -> Collection[str]:
        return self._loaded.missing_outputs

    def healthy(self) -> bool:
        if not all(instance.healthy() for instance in self._loaded.instances):
            return False
        return all(part.healthy() for part in self._parts)

    def gauges(self) -> Sequence[GaugeSample]:
        return self._loaded.gauges()

    def reads_answer(self, request: InferRequest) -> AnswerReader | None:
        """A reader of the answer to a request, to compare it with another version's; None: they may differ."""
        return self._loaded.reads_answer(request)

    @property
    def promised_bytes(self) -> int:
        """Bytes of memory that look free but that it will use."""
        return self._loaded.promised_bytes()

    def id_digests(self) -> Mapping[str, str]:
        """Digests of the meaning of the ids in its tensors, by name; blocking."""
        return self._loaded.id_digests()

    def allowance(self, tenant: Tenant) -> Allowance | None:
        """What is left of a tenant's limits, here or in the first step that has limits; None: there are none."""
        own = self._loaded.allowance(tenant)
        return own or next(filter(None, (part.allowance(tenant) for part in self._parts)), None)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about this model, or about the first step that has some."""
        return self._loaded.facts or next((part.facts for part in self._parts if part.facts), {})

    @property
    def adapters(self) -> Adapters | None:
        """The adapters of this model, or of the first step that has some."""
        return self._loaded.adapters or next((part.adapters for part in self._parts if part.adapters), None)

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        """The histograms of its backend."""
        return self._loaded.histograms

    async def infer(
        self, request: InferRequest, ensemble_timing: RequestTiming | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses of one request; the last one is `final`.

        Raises `LlmserveError` if the request is refused. The model's results, errors included, are responses.
        """
        if self._inline is not None:
            if self._turn.is_over():
                await asyncio.sleep(0)
            if (answer := self.infer_inline(request, ensemble_timing)) is not None:
                yield answer
                return
        timing = RequestTiming()
        prepared = self._prepare(request, timing)
        trace = request.trace
        if trace is not None:
            trace.begin(self.name, self.version, request, timing)
        wanted = frozenset(request.requested_outputs)
        outcome = _Outcome()
        self._hold()
        try:
            async with aclosing(self._scheduler.infer(prepared, timing)) as stream:
                async for response in stream:
                    if not response.final and not self._decoupled:
                        response = await self._single(response, stream)
                    converted = self._to_client(response, wanted, timing)
                    if response.error is not None:
                        self._failed(outcome, response.error)
                    outcome.is_final = response.final
                    if trace is not None:
                        trace.response(converted.outputs)
                    yield converted
            if not outcome.is_final:
                outcome.is_final = True
                yield InferResponse(self.name, self.version, request.request_id, final=True)
        except (Rejected, SequenceError):
            outcome.failure = FailureReason.REJECTED
            raise
        except Exception as error:  # border: a backend's exception becomes an error response of this request only
            if outcome.is_final:
                raise
            self._failed(outcome, error)
            yield self._error_response(request, error)
        finally:
            self._release()
            self._account(prepared, timing, outcome)
            if trace is not None:
                trace.end(timing, composed=bool(self._parts), error=outcome.reason)
            if ensemble_timing is not None:
                ensemble_timing.add(timing)

    @property
    def runs_inline(self) -> bool:
        """Whether it is worth trying `infer_inline`."""
        return self._inline is not None

    def infer_inline(self, request: InferRequest, ensemble_timing: RequestTiming | None = None) -> InferResponse | None:
        """The one response of a brief request, executed inline; None: use `infer`. Raises the same errors as `infer`.

        Call it only while the loop's turn is not over.
        """
        inline = self._inline
        if inline is None or not fits_inline(inline, request):
            return None
        timing = RequestTiming()
        prepared = self._prepare(request, timing)
        trace = request.trace
        if trace is not None:
            trace.begin(self.name, self.version, request, timing)
        outcome = _Outcome(is_final=True)
        began_ns = time.monotonic_ns()
        try:
            answer = inline.execute_inline(prepared)
            timing.infer_ns = time.monotonic_ns() - began_ns
            answer = self._to_client(answer, frozenset(request.requested_outputs), timing)
        except Exception as error:  # border: as in `infer`
            answer = self._error_response(request, error)
        if answer.error is not None:
            self._failed(outcome, answer.error)
        self.statistics.batch_executed(self.signature.batch_size(prepared), input_ns=0, infer_ns=timing.infer_ns)
        self._account(prepared, timing, outcome)
        if trace is not None:
            trace.response(answer.outputs)
            trace.end(timing, composed=False, error=outcome.reason)
        if ensemble_timing is not None:
            ensemble_timing.add(timing)
        return answer

    async def unused(self) -> None:
        """Wait until no request runs, here or in an ensemble that it is a part of."""
        if self._num_holds:
            self._unused = self._unused or asyncio.Event()
            await self._unused.wait()

    def _hold(self) -> None:
        self._num_holds += 1
        for part in self._parts:
            part._hold()

    def _release(self) -> None:
        for part in self._parts:
            part._release()
        self._num_holds -= 1
        if self._unused is not None and not self._num_holds:
            self._unused.set()
            self._unused = None

    async def close(self) -> None:
        """Refuse waiting requests, then close the instances; running requests end with an error."""
        self._inline = None  # from here on the scheduler refuses
        await self._scheduler.stop()
        await asyncio.gather(*(instance.close() for instance in self._loaded.instances))

    def _prepare(self, request: InferRequest, timing: RequestTiming) -> InferRequest:
        self.signature.check(request)
        prepared = self.signature.to_model(request)
        timing.input_ns = time.monotonic_ns() - timing.start_ns
        return prepared

    def _to_client(self, response: InferResponse, wanted: frozenset[str], timing: RequestTiming) -> InferResponse:
        if not response.outputs:
            return response
        if not timing.first_response_ns:
            self.statistics.first_response(timing)
        if self._passes_responses:
            return response
        start_ns = time.monotonic_ns()
        outputs = self.signature.from_model(response.outputs, wanted)
        is_ours = response.model_name == self.name and response.model_version == self.version
        if not is_ours or outputs is not response.outputs:
            response = InferResponse(
                self.name,
                self.version,
                response.request_id,
                outputs,
                response.parameters,
                response.error,
                response.final,
            )
        timing.output_ns += time.monotonic_ns() - start_ns
        return response

    async def _single(self, answer: InferResponse, stream: AsyncGenerator[InferResponse, None]) -> InferResponse:
        """The one answer of a model that is not decoupled, data or an error, however its backend splits it."""
        async for response in stream:
            if answer.outputs and response.outputs:
                raise InternalError(
                    f"model '{self.name}' sent more than one response to a request; only a decoupled model may: set "
                    "model_transaction_policy { decoupled: true } in its config.pbtxt"
                )
            if response.outputs or response.error is not None:
                answer = response
            if response.final:
                break
        return answer if answer.final else replace(answer, final=True)

    def _failed(self, outcome: _Outcome, error: Exception) -> None:
        outcome.failure = self._failure_reason(error)
        outcome.is_limited = isinstance(error, RateLimited)

    def _failure_reason(self, error: Exception) -> FailureReason:
        if not self._loaded.instances:
            return FailureReason.OTHER  # an ensemble
        if isinstance(error, Cancelled):
            return FailureReason.CANCELED
        return FailureReason.REJECTED if isinstance(error, ResourceExhausted) else FailureReason.BACKEND

    def _error_response(self, request: InferRequest, error: Exception) -> InferResponse:
        if not isinstance(error, LlmserveError):
            logger.error("model '%s' failed", self.name, exc_info=error)
            error = InternalError(f"model '{self.name}' failed: {type(error).__name__}: {error}")
        return InferResponse(self.name, self.version, request.request_id, error=error, final=True)

    def _account(self, request: InferRequest, timing: RequestTiming, outcome: _Outcome) -> None:
        if outcome.is_limited:
            return
        if outcome.failure is not None:
            self.statistics.request_failed(timing, outcome.failure)
        elif not outcome.is_final:
            self.statistics.request_failed(timing, FailureReason.CANCELED)
        else:
            self.statistics.request_succeeded(timing, self.signature.batch_size(request))
