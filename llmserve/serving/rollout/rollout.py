"""One rollout: watches requests, applies the rules, and reports the decision to promote or to roll back."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from llmserve.serving.config.labels import Labels
from llmserve.serving.config.rollout_rules import RolloutRules
from llmserve.serving.model import ServedModel
from llmserve.serving.rollout.candidates import Candidate
from llmserve.serving.rollout.progress import Decision, Progress, Verdict
from llmserve.serving.rollout.shadow import CopyOutcome, ShadowCopy, Stopwatch, Timing
from llmserve.serving.types import InferRequest

MAX_COPIES = 16  # that run at the same time
LOOK_S = 0.25  # between two checks of the time and of the candidate's health

logger = logging.getLogger(__name__)


class RolloutState(StrEnum):
    LOADING = "loading"
    SHADOW = "shadow"
    CANARY = "canary"
    WAITING = "waiting"  # for a manual promotion
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"  # the candidate was never ready


ENDS = (RolloutState.PROMOTED, RolloutState.ROLLED_BACK, RolloutState.FAILED)


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    at: datetime
    what: str
    reason: str


class Rollout:
    """A rollout, and the `Watch` of its requests. Use it on the event loop."""

    def __init__(
        self, name: str, candidate: Candidate, rules: RolloutRules, on_verdict: Callable[[Rollout, Decision], None]
    ) -> None:
        self.name = name
        self.candidate = candidate
        self.rules = rules
        self.state = RolloutState.LOADING
        self.began = datetime.now(UTC)
        self.decisions: list[LoggedDecision] = []
        self.progress = Progress(rules, time.monotonic())
        self.stable: ServedModel | None = None  # None before the start and after the end
        self.model: ServedModel | None = None  # the candidate's, until the end; for an adapter, the stable one
        self.stable_version = ""
        self.labels: Labels = {}  # of the candidate
        self.chance = random.Random()
        self.is_promoting = False
        self._on_verdict = on_verdict
        self._copies: dict[asyncio.Task[CopyOutcome], ShadowCopy] = {}
        self._waiting: set[asyncio.Timeout] = set()
        self._looking: asyncio.Task[None] | None = None

    @property
    def is_active(self) -> bool:
        return self.state not in ENDS

    @property
    def is_on(self) -> bool:
        """Whether both versions are loaded, and requests may be split between them."""
        return self.is_active and self.state is not RolloutState.LOADING

    def begin(self) -> None:
        """Both versions are ready: begin to split requests between them."""
        assert self.stable is not None
        assert self.model is not None
        self.stable_version, self.labels = self.stable.version, self.model.labels
        self.progress = Progress(self.rules, time.monotonic())
        self._enter()
        self.note("started", f"it is beside {self.candidate.beside(self.stable)}")
        self._looking = asyncio.ensure_future(self._look())

    def note(self, what: str, reason: str) -> None:
        self.decisions.append(LoggedDecision(datetime.now(UTC), what, reason))
        level = logging.WARNING if what in (RolloutState.ROLLED_BACK, RolloutState.FAILED) else logging.INFO
        logger.log(level, "rollout of model '%s', %s: %s: %s", self.name, self.candidate, what, reason)

    def end(self, state: RolloutState, reason: str, *, rescues: bool = False) -> None:
        """End the rollout: it sends no more requests to the candidate. Those that the candidate answers now continue.

        `rescues`: the stable version answers requests that still wait for the candidate.
        """
        self.state = state
        self.stable = self.model = None
        self.note(state, reason)
        if self._looking is not None:
            self._looking.cancel()
        for task in tuple(self._copies):
            task.cancel()
        for patience in self._waiting if rescues else ():
            if not patience.expired():
                patience.reschedule(0.0)

    @property
    def canary_share(self) -> float:
        return self.progress.canary_share if self.is_on else 0.0

    @property
    def first_response_limit_s(self) -> float:
        return self.progress.first_response_limit_s

    def waiting(self, patience: asyncio.Timeout, *, begins: bool) -> None:
        (self._waiting.add if begins else self._waiting.discard)(patience)

    def watches(self, request: InferRequest) -> bool:
        return self.candidate.watches(request)

    def for_candidate(self, request: InferRequest) -> InferRequest:
        return self.candidate.asked(request)

    def copy_of(self, request: InferRequest) -> ShadowCopy | None:
        if not self.is_on or self.chance.random() >= self.rules.shadow:
            return None
        if len(self._copies) >= MAX_COPIES:
            self.progress.num_not_copied += 1
            return None
        assert self.stable is not None
        assert self.model is not None
        copy = ShadowCopy(self.stable, self.model, self.for_candidate(request), self.rules.timeout_s)
        self._copies[copy.task] = copy
        copy.task.add_done_callback(self._copy_ended)
        return copy

    def _copy_ended(self, task: asyncio.Task[CopyOutcome]) -> None:
        del self._copies[task]
        if task.cancelled() or not self.is_on:
            return
        if (fault := task.exception()) is not None:
            logger.error("a copy of a request failed", exc_info=fault)
            return
        outcome = task.result()
        self.progress.candidate_ended(self.progress.shadow, outcome.error)
        if outcome.timing is not None:
            self.progress.copies.add(outcome.timing.first_s, outcome.timing.total_s)
        if outcome.equal is not None:
            self.progress.compared(equal=outcome.equal)
        elif not outcome.error:
            self.progress.num_not_comparable += 1
        self._decide()

    def stable_ended(self, watch: Stopwatch) -> None:
        counts = self.progress.stable
        if watch.timing is not None:
            counts.succeeded += 1
            self.progress.latencies["stable"].add(watch.timing.first_s, watch.timing.total_s)
        elif watch.error:
            counts.failed += not watch.is_limited
        else:
            counts.cancelled += 1

    def candidate_timed(self, timing: Timing) -> None:
        if self.is_on:
            self.progress.candidate_timed(timing.first_s, timing.total_s)

    def canary_succeeded(self) -> None:
        if self.is_on:
            self.progress.candidate_ended(self.progress.canary)
            self._decide()

    def canary_failed(self, error: str, *, rescued: bool) -> None:
        if self.is_on:
            self.progress.num_rescued += rescued
            self.progress.candidate_ended(self.progress.canary, error)
            self._decide()

    def canary_left(self, waited_s: float) -> None:
        if not self.is_on:
            return
        self.progress.canary.cancelled += 1
        if self.progress.is_overdue(waited_s):
            self.progress.candidate_ended(self.progress.canary, f"its client gave up after {waited_s:.1f} s")
            self._decide()

    def _decide(self) -> None:
        if not self.is_on or self.is_promoting:
            return
        decision = self.progress.decide(time.monotonic())
        if decision is None:
            return
        if decision.verdict in (Verdict.NEXT_STEP, Verdict.WAIT):
            self._enter()
            self.note(decision.verdict, decision.reason)
        else:
            self._on_verdict(self, decision)

    def _enter(self) -> None:
        """Set the state that the progress implies."""
        if self.progress.is_waiting:
            self.state = RolloutState.WAITING
        else:
            self.state = RolloutState.CANARY if self.progress.canary_share else RolloutState.SHADOW

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self.model is not None and not self.model.healthy():
                self._on_verdict(self, Decision(Verdict.ROLL_BACK, "an instance of the candidate has stopped working"))
                return
            self._decide()
