"""Limits of tenants on an engine: tokens per minute, and answers at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from llmserve.core import Allowance, Tenant
from llmserve.errors import InvalidArgument, RateLimited
from llmserve.tenant_counters import MAX_ANSWERS, TOKENS_PER_MINUTE

MINUTE_S = 60.0


def check_num_answers(tenant: Tenant, num_running: int, num_more: int) -> None:
    """Raises `RateLimited` if the tenant may not run so many more now, `InvalidArgument` if it never may."""
    num_answers = num_running + num_more
    if num_more > tenant.max_answers > 0:
        raise InvalidArgument(
            f"'{tenant.name}' may have {tenant.max_answers} answers running at once, but this request asks for "
            f"{num_more}; ask for fewer"
        )
    if num_answers > tenant.max_answers > 0:
        raise RateLimited(
            f"'{tenant.name}' may have {tenant.max_answers} answers running at once, but this request "
            f"would make it {num_answers}; wait for one of them",
            limit=MAX_ANSWERS,
        )


class TokenBudgets:
    """A tenant starts with one minute's tokens and gains as many per minute, but never has more than these.

    A tenant with tokens left may send a request. Its cost is known later and may exceed them; the debt must be paid off
    before the next request. Thread-safe: engines may share one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[Tenant, tuple[float, float]] = {}  # tokens left, and the time of that count

    def check(self, tenant: Tenant) -> None:
        """Raises `RateLimited`, with the time to wait."""
        left = self._tokens_left(tenant)
        if left <= 0:
            raise RateLimited(
                f"'{tenant.name}' has used its {tenant.tokens_per_minute} tokens per minute; try again later",
                limit=TOKENS_PER_MINUTE,
                retry_after_s=(1 - left) * MINUTE_S / tenant.tokens_per_minute,
            )

    def left(self, tenant: Tenant) -> tuple[int, float]:
        """Tokens left, and the seconds until all are available again."""
        left = self._tokens_left(tenant)
        return max(0, int(left)), (tenant.tokens_per_minute - left) * MINUTE_S / tenant.tokens_per_minute

    def allowance(self, tenant: Tenant, num_answers: int) -> Allowance:
        """Returns the tenant's remaining limits, with so many answers running."""
        tokens, back_s = self.left(tenant) if tenant.tokens_per_minute else (0, 0.0)
        return Allowance(max(0, tenant.max_answers - num_answers), tokens, back_s)

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        with self._lock:
            self._left[tenant] = self._tokens_left(tenant) - num_tokens, self._clock()

    def _tokens_left(self, tenant: Tenant) -> float:
        most = float(tenant.tokens_per_minute)
        left, when = self._left.get(tenant, (most, 0.0))
        return min(most, left + (self._clock() - when) * most / MINUTE_S)
