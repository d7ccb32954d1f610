"""The speed of an engine as it is served, compared with its last record on the same class of machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.benchmark.load import Run
from llmserve.benchmark.summary import summarize
from llmserve.engine.directory.gate_record import GateRecord
from llmserve.engine.machine.description import machine_name
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.served.measures import MEASURES
from llmserve.evaluation.served.replies import ServedAnswer


@dataclass(frozen=True, slots=True)
class Speed:
    machine: str
    num_in_flight: int
    values: Mapping[str, float]  # by measure

    def document(self) -> dict[str, Any]:
        return {"machine": self.machine, "in_flight": self.num_in_flight, "values": dict(self.values)}


@dataclass(frozen=True, slots=True)
class SpeedResult:
    """One measure, compared with the last record."""

    measure: str
    value: float
    previous: float | None = None
    margin: float | None = None  # how many times worse it may be

    @property
    def group(self) -> str:
        return "speed"

    @property
    def ratio(self) -> float | None:
        """How many times worse than the last record; None without one."""
        if not self.previous or not self.value:
            return None
        better = MEASURES[self.measure].more_is_better
        return self.previous / self.value if better else self.value / self.previous

    @property
    def is_judged(self) -> bool:
        return self.margin is not None and self.ratio is not None

    @property
    def verdict(self) -> Verdict:
        if self.margin is None or self.ratio is None or self.ratio <= self.margin:
            return Verdict.PASS
        return Verdict.FAIL

    @property
    def reason(self) -> str:
        measure = MEASURES[self.measure]
        now, before = (f"{measure.scale * (value or 0.0):,.4g} {measure.unit}" for value in (self.value, self.previous))
        return f"{measure.title} {now} is {self.ratio or 0:.2f} times as bad as the last {before}, not {self.margin:g}"


def measured(
    alone: Sequence[ServedAnswer], in_flight: Sequence[ServedAnswer], *,
    memory: int | None = None, build_seconds: float | None = None, open_seconds: float | None = None,
) -> Speed:  # fmt: skip
    """Missing values are left out."""
    one, many = (
        summarize(Run([reply.record for reply in replies if reply.record.arrived])) for replies in (alone, in_flight)
    )
    values: dict[str, float] = {}
    for measure, metric in (("ttft", "time_to_first_token"), ("itl", "inter_token_latency")):
        if metric in one.distributions:
            values[measure] = one.distributions[metric].percentiles[50] / 1e3
    if many.output_tokens:
        values["throughput"] = many.per_second(many.output_tokens)
    values |= {"memory": float(memory)} if memory is not None else {}
    values |= {"build": build_seconds} if build_seconds is not None else {}
    values |= {"open": open_seconds} if open_seconds is not None else {}
    return Speed(machine_name(), len(in_flight), values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison with the last record, or why there is none."""

    results: tuple[SpeedResult, ...]
    note: str


def compare_speed(speed: Speed, records: Sequence[GateRecord], suite: str, margins: Mapping[str, float]) -> Comparison:
    """`records`: the oldest first, of any digest. Records from another class of machine are named but not compared."""
    last = next((one for one in reversed(records) if one.suite == suite and one.speed is not None), None)
    previous: Mapping[str, float] = {}
    if last is None or last.speed is None:
        note = "speed: no earlier record to compare with"
    elif (machine := str(last.speed["machine"])) != speed.machine:
        note = f"speed: the last record ({last.time}) is from another machine ({machine}), so it is not compared"
    else:
        note = f"speed: compared with the record of {last.time}, digest {last.engine_digest[:12]}"
        previous = last.speed["values"]
    results = tuple(
        SpeedResult(measure, value, previous.get(measure), margins.get(measure))
        for measure, value in speed.values.items()
    )
    return Comparison(results, note)
