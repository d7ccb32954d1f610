"""`ReplicatedEngine`: engines of one directory on several devices, used as one.

A request goes to the engine with the fewest running answers. A failed engine gets no more requests: its own streams
end, the others continue, and the whole is healthy as long as one engine is.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Any

from llmserve.core import Allowance, GenerateRequest, Tenant, TokenEvent
from llmserve.engine.base import Engine, EngineInfo, EngineStats
from llmserve.engine.budgets import TokenBudgets, check_num_answers
from llmserve.errors import Unavailable

logger = logging.getLogger(__name__)

# Totals include failed engines, so that they never decrease. Other numbers are from healthy engines.
DONE = (
    "iteration",
    "reused_blocks",
    "missed_blocks",
    "total_ctx_tokens",
    "total_gen_tokens",
    "total_preemptions",
    "total_drafted_tokens",
    "total_accepted_tokens",
)


class ReplicatedEngine:
    """Owns `engines`, which are named after their devices, and closes them. `budgets`: shared by all, so that a
    tenant's tokens count once."""

    def __init__(self, engines: Mapping[str, Engine], budgets: TokenBudgets) -> None:
        self._engines = dict(engines)
        self._budgets = budgets
        self._lock = threading.Lock()  # guards the following
        self._open = Counter[str]()  # running answers, by engine
        self._answers = Counter[Tenant]()  # of tenants that have such a limit
        self._failed = set[str]()  # failures that were logged

    @property
    def info(self) -> EngineInfo:
        return next(iter(self._engines.values())).info

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Engine.submit`. The engine is chosen at the first pull."""
        self._engines[self._least_loaded()].submit(request)  # refuse requests that no engine would accept
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        name = self._begin(request)
        try:
            async with aclosing(self._engines[name].submit(request)) as stream:
                async for event in stream:
                    yield event
        finally:
            self._end(name, request)

    def _begin(self, request: GenerateRequest) -> str:
        """The engine that will answer; its count of answers is increased."""
        tenant, num_answers = request.tenant, request.num_sequences
        name = self._least_loaded()
        with self._lock:
            if tenant.max_answers:
                check_num_answers(tenant, self._answers[tenant], num_answers)
                self._answers[tenant] += num_answers
            self._open[name] += num_answers
        return name

    def _end(self, name: str, request: GenerateRequest) -> None:
        with self._lock:
            self._open[name] -= request.num_sequences
            self._answers[request.tenant] -= request.num_sequences
            self._answers = +self._answers  # without engines that have none left

    def _least_loaded(self) -> str:
        healthy = self._healthy()
        if not healthy:
            raise Unavailable(f"the engine has failed on every device ({', '.join(self._engines)})")
        with self._lock:
            return min(healthy, key=self._open.__getitem__)

    def _healthy(self) -> list[str]:
        healthy = [name for name, engine in self._engines.items() if engine.healthy()]
        with self._lock:
            failed = self._engines.keys() - healthy - self._failed
            self._failed |= failed
        for name in sorted(failed):
            logger.error("the engine on %s gets no more requests; %d of %d do", name, len(healthy), len(self._engines))
        return healthy

    def stats(self) -> EngineStats:
        healthy = self._healthy()
        stats = {name: engine.stats() for name, engine in self._engines.items()}
        total: dict[str, Any] = {
            field.name: _sum([getattr(stats[name], field.name) for name in (stats if field.name in DONE else healthy)])
            for field in fields(EngineStats)
        }
        blocks = max(one.tokens_per_block for one in stats.values())
        num_failed = len(stats) - len(healthy)
        return EngineStats(**total | {"tokens_per_block": blocks, "num_failed_replicas": num_failed})

    def allowance(self, tenant: Tenant) -> Allowance:
        """See `MeteringEngine`."""
        with self._lock:
            num_answers = self._answers[tenant]
        return self._budgets.allowance(tenant, num_answers)

    def healthy(self) -> bool:
        return bool(self._healthy())

    def close(self) -> None:
        """See `Engine.close`."""
        for engine in self._engines.values():
            engine.close()


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
