"""Counts the outcomes of each tenant's requests for the core."""

from __future__ import annotations

from llmserve.core import Tenant
from llmserve.errors import Cancelled, DeadlineExceeded, InvalidArgument, LlmserveError, RateLimited, ResourceExhausted
from llmserve.serving.schedulers.base import Rejected, SequenceError
from llmserve.serving.types import InferResponse
from llmserve.tenant_counters import CANCELLED, FAILED, SERVER, SUCCEEDED, RequestCounters


class CountedRequest:
    """One request of a tenant, in flight until `end`."""

    __slots__ = ("_counters", "_failure", "_fits", "_is_final")

    def __init__(self, counters: RequestCounters) -> None:
        self._counters = counters
        self._failure: LlmserveError | None = None
        self._fits = True
        self._is_final = False
        counters.num_in_flight += 1

    def see(self, response: InferResponse) -> None:
        """Call it with each response that has an error, and with the last one."""
        self._failure = response.error or self._failure
        self._is_final = response.final

    def refused(self, error: LlmserveError) -> None:
        """`error` was raised instead of more responses. A request that does not fit the config is not counted, as in
        the model's own statistics."""
        self._failure = error
        self._fits = isinstance(error, SequenceError) or not isinstance(error, InvalidArgument)

    def end(self) -> None:
        counters, failure = self._counters, self._failure
        counters.num_in_flight -= 1
        if not self._fits:
            return
        if isinstance(failure, RateLimited):
            counters.refusals[failure.limit] += 1
        elif isinstance(failure, ResourceExhausted | Rejected):
            counters.refusals[SERVER] += 1
        elif isinstance(failure, Cancelled | DeadlineExceeded) or (failure is None and not self._is_final):
            counters.outcomes[CANCELLED] += 1
        else:
            counters.outcomes[SUCCEEDED if failure is None else FAILED] += 1


def counted_request(tenant: Tenant, model: str) -> CountedRequest | None:
    """Begin to count a request; None if the tenant's requests are not counted."""
    return None if tenant.counters is None else CountedRequest(tenant.counters.requests[model])
