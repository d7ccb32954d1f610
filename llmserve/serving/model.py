"""One loaded version of a model: its config, its scheduler, what it has done.

`infer` is where every request of the model passes, whoever sent it: checks, statistics, and the border at which a
backend's exception becomes an error response.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InternalError, LlmserveError
from llmserve.serving.backend import GaugeSample, LoadedModel
from llmserve.serving.schedulers.base import ModelScheduler, Rejected
from llmserve.serving.signature import ModelSignature
from llmserve.serving.statistics import FailureReason, ModelStatistics, RequestTiming
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outcome:
    """What has been seen of one request."""

    is_rejected: bool = False
    has_error: bool = False
    is_final: bool = False

    def saw(self, response: InferResponse) -> None:
        self.has_error = self.has_error or response.error is not None
        self.is_final = response.final


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
    ) -> None:
        self.name: str = config.name
        self.version = version
        self.config = config
        self.signature = signature
        self.statistics = statistics
        self._scheduler = scheduler
        self._loaded = loaded
        self._model_failure = FailureReason.BACKEND if loaded.instances else FailureReason.OTHER

    @property
    def num_pending(self) -> int:
        return self._scheduler.num_pending

    @property
    def decoupled(self) -> bool:
        return bool(self.config.model_transaction_policy.decoupled)

    def healthy(self) -> bool:
        return all(instance.healthy() for instance in self._loaded.instances)

    def gauges(self) -> Sequence[GaugeSample]:
        return self._loaded.gauges()

    async def infer(
        self, request: InferRequest, ensemble_timing: RequestTiming | None = None
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses of one request; the last one is `final`.

        Raises `LlmserveError` when the request is refused; what the model makes of it, errors included, are responses.
        """
        timing = RequestTiming()
        prepared = self._prepare(request, timing)
        wanted = frozenset(request.requested_outputs)
        outcome = _Outcome()
        try:
            async with aclosing(self._scheduler.infer(prepared, timing)) as stream:
                async for response in stream:
                    outcome.saw(response)
                    yield self._to_client(response, wanted, timing)
            if not outcome.is_final:
                outcome.is_final = True
                yield InferResponse(self.name, self.version, request.request_id, final=True)
        except Rejected:
            outcome.is_rejected = True
            raise
        except Exception as error:  # border: whatever a backend raises is an error response of this request alone
            if outcome.is_final:
                raise
            outcome.has_error = True
            yield self._error_response(request, error)
        finally:
            self._account(prepared, timing, outcome)
            if ensemble_timing is not None:
                ensemble_timing.add(timing)

    async def close(self) -> None:
        """Refuse what waits, then end the instances; running requests end with an error."""
        await self._scheduler.stop()
        await asyncio.gather(*(instance.close() for instance in self._loaded.instances))

    def _prepare(self, request: InferRequest, timing: RequestTiming) -> InferRequest:
        try:
            self.signature.check(request)
        except LlmserveError:
            self.statistics.request_failed(timing, FailureReason.OTHER)
            raise
        prepared = self.signature.to_model(request)
        timing.input_ns = time.monotonic_ns() - timing.start_ns
        return prepared

    def _to_client(self, response: InferResponse, wanted: frozenset[str], timing: RequestTiming) -> InferResponse:
        if not response.outputs:
            return response
        start_ns = time.monotonic_ns()
        outputs = self.signature.from_model(response.outputs, wanted)
        finished = InferResponse(
            self.name, self.version, response.request_id, outputs, response.parameters, response.error, response.final
        )
        timing.output_ns += time.monotonic_ns() - start_ns
        return finished

    def _error_response(self, request: InferRequest, error: Exception) -> InferResponse:
        if not isinstance(error, LlmserveError):
            logger.error("model '%s' failed", self.name, exc_info=error)
            error = InternalError(f"model '{self.name}' failed: {type(error).__name__}: {error}")
        return InferResponse(self.name, self.version, request.request_id, error=error, final=True)

    def _account(self, request: InferRequest, timing: RequestTiming, outcome: _Outcome) -> None:
        if outcome.is_rejected:
            self.statistics.request_failed(timing, FailureReason.REJECTED)
        elif outcome.has_error:
            self.statistics.request_failed(timing, self._model_failure)
        elif not outcome.is_final:
            self.statistics.request_failed(timing, FailureReason.CANCELED)
        else:
            self.statistics.request_succeeded(timing, self.signature.batch_size(request))
