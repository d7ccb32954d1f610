"""Results of a load, with the names and definitions of NVIDIA's aiperf.

    time to first token     from sending a request to the first text of its answer
    inter-token latency     (end - first text) / (tokens - 1), a mean for each answer
    inter-chunk latency     between one piece of text and the next, of all answers
    request latency         from sending a request to the last text of its answer
    duration                from the first request sent to the last text of an answer
    throughput              answered requests, or their tokens, divided by the duration
    goodput                 answered requests that meet every objective, divided by the duration

Failed requests are counted by kind, and excluded from everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmserve.benchmark.load import Run
from llmserve.benchmark.records import Record
from llmserve.errors import InvalidArgument

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
MS = 1e3
BUSY_CORE = 0.9  # share of one core, the most that this program's event loop can use
LATE_S = 0.02  # at the 99th percentile: more would distort a server's latencies
OBJECTIVES = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "request_latency"}
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a metric, in its unit; percentiles are interpolated linearly."""

    unit: str
    count: int
    mean: float
    deviation: float
    low: float
    high: float
    percentiles: Mapping[int, float]

    def document(self) -> dict[str, Any]:
        """Returns JSON with aiperf's names."""
        percentiles = {f"p{percent}": value for percent, value in self.percentiles.items()}
        spread = {"avg": self.mean, "min": self.low, "max": self.high, "std": self.deviation}
        return {"unit": self.unit, "count": self.count, **spread, **percentiles}


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit for a request's metric."""

    name: str  # one of OBJECTIVES
    limit_s: float

    def is_met(self, record: Record) -> bool:
        """Returns whether the limit is met. A missing metric, such as the time between tokens of one, meets it."""
        value = {
            "ttft": record.time_to_first_token,
            "itl": record.inter_token_latency,
            "e2e": record.latency,
        }[self.name]
        return value is None or value <= self.limit_s

    def __str__(self) -> str:
        return f"{self.name} {self.limit_s * MS:g} ms"


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of one load. Without answers there are no distributions."""

    answered: int
    cut: int  # unfinished when the time was over
    errors: Mapping[str, int]  # by kind
    messages: Mapping[str, str]  # the server's first message for each kind
    duration_s: float
    output_tokens: int
    input_tokens: int | None  # None: the server does not count
    good: int | None  # None: without objectives
    distributions: Mapping[str, Distribution]
    lateness: Distribution | None  # of an open loop: how long after its due time each request was sent
    lag: Distribution | None  # delays of this program's event loop
    busy: float  # mean number of cores that this program used
    is_counted: bool  # by the server; otherwise each piece counts as a token
    was_given_up: bool
    was_interrupted: bool

    def per_second(self, count: float) -> float:
        return count / self.duration_s if self.duration_s else 0.0

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def bottleneck(self) -> str:
        """Returns why this program limited the results more than the server did; empty if it did not."""
        reasons = []
        if self.busy >= BUSY_CORE:
            reasons.append(f"it used {self.busy:.0%} of a core")
        if self.lateness is not None and (late := self.lateness.percentiles[99]) > LATE_S * MS:
            reasons.append(f"requests were sent up to {late:.0f} ms late (99th percentile)")
        if self.lag is not None and (lag := self.lag.percentiles[99]) > LATE_S * MS:
            reasons.append(f"it read responses up to {lag:.0f} ms late (99th percentile)")
        return "; ".join(reasons)

    def document(self) -> dict[str, Any]:
        """Returns JSON, with aiperf's names where they exist."""
        values: dict[str, Any] = {
            "request_count": self.answered,
            "error_request_count": self.failed,
            "errors": [
                {"kind": kind, "count": count, "message": self.messages[kind]} for kind, count in self.errors.items()
            ],
            "cut_request_count": self.cut,
            "benchmark_duration": self.duration_s,
            "request_throughput": self.per_second(self.answered),
            "output_token_throughput": self.per_second(self.output_tokens),
            "total_osl": self.output_tokens,
        }
        if self.input_tokens is not None:
            values["total_isl"] = self.input_tokens
            values["total_token_throughput"] = self.per_second(self.input_tokens + self.output_tokens)
        if self.good is not None:
            attempted = self.answered + self.failed
            values["good_request_count"] = self.good
            values["good_request_fraction"] = self.good / attempted if attempted else 0.0
            values["goodput"] = self.per_second(self.good)
        client: dict[str, Any] = {"cores": self.busy, "was_the_bottleneck": bool(self.bottleneck())}
        client |= {
            name: one.document() for name, one in (("lateness", self.lateness), ("lag", self.lag)) if one is not None
        }
        metrics = {name: one.document() for name, one in self.distributions.items()}
        ended = {"was_given_up": self.was_given_up, "was_interrupted": self.was_interrupted}
        counted_by = "server" if self.is_counted else "pieces"
        return {**values, **metrics, "client": client, "tokens_counted_by": counted_by, **ended}


def parse_objectives(texts: Sequence[str]) -> list[Objective]:
    """Parses `ttft:200ms` and similar texts. Raises `InvalidArgument`."""
    return [_objective(text) for text in texts]


def _objective(text: str) -> Objective:
    name, _, limit = text.partition(":")
    for unit, seconds in UNITS.items():
        number = limit.removesuffix(unit)
        if name in OBJECTIVES and number != limit and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return Objective(name, float(number) * seconds)
    raise InvalidArgument(f"--slo {text}: expected ttft:200ms, itl:50ms or e2e:2s")


def summarize(run: Run, objectives: Sequence[Objective] = ()) -> Summary:
    whole = [record for record in run.records if not record.is_cut]
    answered = [record for record in whole if not record.error]
    failed = [record for record in whole if record.error]
    errors = Counter(record.error for record in failed)
    is_counted = all(record.completion_tokens is not None for record in answered)
    lateness = [record.started - record.due for record in run.records if record.due is not None]
    return Summary(
        answered=len(answered),
        cut=len(run.records) - len(whole),
        errors=dict(errors.most_common()),
        messages={record.error: record.message for record in reversed(failed)},
        duration_s=_duration(answered),
        output_tokens=sum(record.num_tokens for record in answered),
        input_tokens=_prompt_tokens(answered),
        good=sum(all(each.is_met(one) for each in objectives) for one in answered) if objectives else None,
        distributions=_distributions(answered),
        lateness=distribution(lateness, "ms", MS),
        lag=distribution(run.lags, "ms", MS),
        busy=run.busy,
        is_counted=is_counted,
        was_given_up=run.was_given_up,
        was_interrupted=run.was_interrupted,
    )


def _duration(answered: Sequence[Record]) -> float:
    if not answered:
        return 0.0
    return max(record.arrived[-1] for record in answered) - min(record.started for record in answered)


def _prompt_tokens(answered: Sequence[Record]) -> int | None:
    counts = [record.prompt_tokens for record in answered if record.prompt_tokens is not None]
    return sum(counts) if counts and len(counts) == len(answered) else None


def _distributions(answered: Sequence[Record]) -> dict[str, Distribution]:
    """Returns distributions by aiperf's names, without metrics that have no values."""
    between = [gap for gap in (record.inter_token_latency for record in answered) if gap is not None]
    gaps = np.concatenate([np.diff(record.arrived) for record in answered]) if answered else np.array([])
    found = {
        "time_to_first_token": distribution([record.time_to_first_token for record in answered], "ms", MS),
        "inter_token_latency": distribution(between, "ms", MS),
        "inter_chunk_latency": distribution(gaps, "ms", MS),
        "request_latency": distribution([record.latency for record in answered], "ms", MS),
        "output_token_throughput_per_user": distribution([1 / gap for gap in between if gap], "tokens/sec/user"),
        "output_sequence_length": distribution([record.num_tokens for record in answered], "tokens"),
        "input_sequence_length": distribution(
            [one.prompt_tokens for one in answered if one.prompt_tokens is not None], "tokens"
        ),
        "cached_prompt_tokens": distribution(
            [one.cached_tokens for one in answered if one.cached_tokens is not None], "tokens"
        ),
    }
    if any(record.drafted_tokens for record in answered):
        for name in ("drafted_tokens", "accepted_tokens"):
            found[name] = distribution([getattr(record, name) or 0 for record in answered], "tokens")
    return {name: one for name, one in found.items() if one is not None}


def distribution(values: Any, unit: str, scale: float = 1.0) -> Distribution | None:
    """Returns the distribution of the values times `scale`; None if there are none."""
    numbers = np.asarray(values, dtype=np.float64) * scale
    if not numbers.size:
        return None
    percentiles = zip(PERCENTILES, np.percentile(numbers, PERCENTILES).tolist(), strict=True)
    low, high = float(numbers.min()), float(numbers.max())
    return Distribution(unit, numbers.size, float(numbers.mean()), float(numbers.std()), low, high, dict(percentiles))
