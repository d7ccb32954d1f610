"""The results of a candidate, and the decisions that the rules derive from them. Callers pass the time.

A step ends when the candidate has had the required requests and time in it, and its results are within the rules. A
candidate that is significantly bad is rolled back at any time. If its results are outside the rules, but not
significantly, the step continues; after ten times the required requests, the candidate is rolled back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from llmserve.serving.config.rollout_rules import AUTOMATIC, RolloutRules
from llmserve.serving.rollout.evidence import RateTest, RatioTest, median_ratio

MAX_SAMPLES = 500  # of each kind, the latest ones
PATIENCE = 10  # times the requests of a step, before a candidate outside the rules is rolled back
SLOWER = 3.0  # times the stable version's slowest first response: then one is overdue
OVERDUE_S = 1.0  # the least time after which a leaving client counts as overdue


class Verdict(StrEnum):
    NEXT_STEP = "next_step"
    WAIT = "wait"  # for a manual promotion
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class Decision:
    verdict: Verdict
    reason: str


@dataclass(slots=True)
class Latencies:
    """Latencies of one version in seconds: to the first response, and in total."""

    num: int = 0
    first: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    total: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    slowest_first: float = 0.0

    def median(self, kind: str) -> float | None:
        """`kind`: first or total; None: there are no samples yet."""
        values = getattr(self, kind)
        return median(values) if values else None

    def add(self, first_s: float, total_s: float) -> None:
        self.num += 1
        self.first.append(first_s)
        self.total.append(total_s)
        self.slowest_first = max(self.slowest_first, first_s)


@dataclass(slots=True)
class Counts:
    """Requests of one version that have ended."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0  # by clients


class Progress:
    def __init__(self, rules: RolloutRules, now: float) -> None:
        self.rules = rules
        self.step = 0
        self.began = now
        self.is_waiting = False  # for a manual promotion
        self.stable = Counts()
        self.canary = Counts()
        self.shadow = Counts()
        self.num_rescued = 0  # canary requests that the stable version answered instead
        self.num_not_comparable = 0
        self.num_not_copied = 0  # requests chosen for a copy while too many copies were running
        # of clients' answers; copies run next to their originals and wait for them, so their times do not count
        self.latencies = {"stable": Latencies(), "candidate": Latencies()}
        self.copies = Latencies()
        self.last_error = ""
        self.errors = RateTest(rules.max_error_rate)
        self.differences = RateTest(round(1.0 - (rules.min_agreement or 0.0), 9))
        ratio = rules.max_latency_ratio
        self._slower = {} if ratio is None else {kind: RatioTest(ratio) for kind in ("first", "total")}
        self._enter_step(now)

    @property
    def canary_share(self) -> float:
        return self.rules.steps[self.step]

    @property
    def first_response_limit_s(self) -> float:
        """Seconds after which a request stops waiting for the candidate."""
        return max(self.rules.timeout_s, SLOWER * self.latencies["stable"].slowest_first)

    def is_overdue(self, waited_s: float) -> bool:
        """Whether a client that left before the first response had waited too long."""
        known = self.latencies["stable"]
        limit = max(OVERDUE_S, SLOWER * known.slowest_first) if known.num else self.rules.timeout_s
        return waited_s > min(limit, self.first_response_limit_s)

    def ratio(self, kind: str) -> float | None:
        """The candidate's median divided by the stable version's; `kind`: first or total."""
        candidate, stable = self.latencies["candidate"], self.latencies["stable"]
        return median_ratio(getattr(candidate, kind), getattr(stable, kind))

    def candidate_timed(self, first_s: float, total_s: float) -> None:
        latencies, stable = self.latencies["candidate"], self.latencies["stable"]
        latencies.add(first_s, total_s)
        for kind, test in self._slower.items():
            test.look(latencies.num, getattr(latencies, kind), getattr(stable, kind))

    def candidate_ended(self, counts: Counts, error: str = "") -> None:
        """Count a request. `counts`: those of canary requests or of copies; `error`: why it failed."""
        if error:
            counts.failed += 1
            self.last_error = error
        else:
            counts.succeeded += 1
        self.errors.add(bad=bool(error))

    def compared(self, *, equal: bool) -> None:
        self.differences.add(bad=not equal)

    def decide(self, now: float) -> Decision | None:
        """The decision that is due; None: the step continues."""
        if bad := self._beyond_doubt():
            return Decision(Verdict.ROLL_BACK, bad)
        if self.is_waiting:
            return None
        wanted, seen = self.rules.requests, self._seen_in_step()
        if seen < wanted or now - self._step_began < self.rules.seconds:
            return None
        if against := self._against():
            if seen < PATIENCE * wanted:
                return None
            return Decision(Verdict.ROLL_BACK, f"after {seen} requests in this step, still {'; '.join(against)}")
        return self._pass_step(now, seen)

    def waits_for(self, now: float) -> str:
        """What the current step still requires, as text."""
        if self.is_waiting:
            return "a manual promotion"
        num_missing = self.rules.requests - self._seen_in_step()
        seconds = self.rules.seconds - (now - self._step_began)
        has_copies = self._num_seen()[0] - self._num_before[0] >= self.rules.requests
        what = "answers that can be compared" if has_copies and not self.canary_share else "requests of the candidate"
        missing = [
            f"{num_missing} more {what}" if num_missing > 0 else "",
            f"{seconds:.0f} more seconds" if seconds > 0 else "",
            *self._against(),
        ]
        return "; ".join(filter(None, missing))

    def _pass_step(self, now: float, seen: int) -> Decision:
        share = self.canary_share
        done = f"{seen} requests " + (f"with a share of {share:.0%}" if share else "copied")
        if self.step + 1 < len(self.rules.steps):
            self.step += 1
            self._enter_step(now)
            return Decision(Verdict.NEXT_STEP, f"{done}, all within the rules; new share {self.canary_share:.0%}")
        if self.rules.promote == AUTOMATIC:
            return Decision(Verdict.PROMOTE, f"{done}, all within the rules; that was the last step")
        self.is_waiting = True
        return Decision(Verdict.WAIT, f"{done}, all within the rules; waiting for a manual promotion")

    def _enter_step(self, now: float) -> None:
        self._step_began = now
        self._num_before = self._num_seen()

    def _num_seen(self) -> tuple[int, int, int]:
        copies, own = self.shadow, self.canary
        return copies.succeeded + copies.failed, self.differences.num_all, own.succeeded + own.failed

    def _seen_in_step(self) -> int:
        """Requests that count for this step: copies (compared ones if agreement is judged) or canary requests."""
        copied, compared, canary = (now - then for now, then in zip(self._num_seen(), self._num_before, strict=True))
        if self.canary_share:
            return canary
        return copied if self.rules.min_agreement is None else min(copied, compared)

    def _beyond_doubt(self) -> str:
        """Why the candidate is significantly bad; "": it is not so far."""
        if self.errors.is_exceeded:
            return f"{self._errors()}, too many for a rate of {self.errors.bound:.2%}; the last one: {self.last_error}"
        if self.differences.is_exceeded:
            return f"{self._differences()}, too many for an agreement of {self.rules.min_agreement:.2%}"
        for kind, test in self._slower.items():
            if test.is_exceeded:
                return f"{self._slowness(kind)}, significantly above {self.rules.max_latency_ratio:g}"
        return ""

    def _against(self) -> list[str]:
        """Results that are outside the rules so far."""
        found = []
        if self.errors.rate > self.errors.bound:
            found.append(f"{self._errors()}, above {self.errors.bound:.2%}")
        if self.differences.rate > self.differences.bound:
            found.append(f"{self._differences()}, below an agreement of {self.rules.min_agreement:.2%}")
        limit = self.rules.max_latency_ratio
        slow = [kind for kind in self._slower if limit is not None and (self.ratio(kind) or 0.0) > limit]
        return [*found, *(f"{self._slowness(kind)}, above {limit:g}" for kind in slow)]

    def _errors(self) -> str:
        return f"{self.errors.num_bad} of {self.errors.num_all} requests failed"

    def _differences(self) -> str:
        return f"{self.differences.num_bad} of {self.differences.num_all} answers differ"

    def _slowness(self, kind: str) -> str:
        what = {"first": "the first response", "total": "the whole answer"}[kind]
        return f"{what} takes {self.ratio(kind) or 0.0:.2f} times as long"
