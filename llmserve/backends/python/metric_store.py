"""Custom metrics of all models of a server. `GET /metrics` shows them.

Models that define the same family share it, and those that define the same labels in it share the metric. Both exist as
long as an instance that has defined them.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric as PrometheusFamily
from prometheus_client.registry import Collector

from llmserve.errors import InvalidArgument, NotFound


@dataclass(slots=True)
class _Metric:
    labels: Mapping[str, str]
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, ascending, without infinity
    owners: set[object] = field(default_factory=set)
    value: float = 0.0  # of a histogram: the sum
    counts: list[int] = field(default_factory=list)  # of a histogram: in each bucket, and beyond


@dataclass(slots=True)
class _Family:
    name: str
    description: str
    kind: str
    owners: set[object] = field(default_factory=set)
    metrics: dict[tuple[tuple[str, str], ...], _Metric] = field(default_factory=dict)


class MetricStore(Collector):
    """May be used from every thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}

    def add_family(self, name: str, description: str, kind: str, *, owner: object) -> None:
        """The first description is kept."""
        with self._lock:
            family = self._families.setdefault(name, _Family(name, description, kind))
            if family.kind != kind:
                raise InvalidArgument(f"metric family '{name}' already exists as a {family.kind}")
            family.owners.add(owner)

    def add(self, family_name: str, labels: Mapping[str, str], bounds: tuple[float, ...], *, owner: object) -> None:
        with self._lock:
            family = self._families[family_name]
            metric = family.metrics.setdefault(
                _key(labels), _Metric(dict(labels), tuple(bounds), counts=[0] * (len(bounds) + 1))
            )
            if metric.bounds != tuple(bounds):
                raise InvalidArgument(
                    f"metric family '{family_name}' already has a metric with these labels but other buckets"
                )
            metric.owners.add(owner)

    def change(self, family_name: str, labels: Mapping[str, str], action: str, value: float) -> None:
        """`action` is increment, set or observe; the metric's kind must support it."""
        with self._lock:
            metric = self._find(family_name, labels)
            metric.value = value if action == "set" else metric.value + value
            if action == "observe":
                metric.counts[bisect.bisect_left(metric.bounds, value)] += 1

    def read(self, family_name: str, labels: Mapping[str, str]) -> float:
        with self._lock:
            return self._find(family_name, labels).value

    def forget(self, owner: object) -> None:
        """Remove the families and metrics of an instance that has ended, unless another instance has them."""
        with self._lock:
            for family in self._families.values():
                family.owners.discard(owner)
                for metric in family.metrics.values():
                    metric.owners.discard(owner)
                family.metrics = {key: metric for key, metric in family.metrics.items() if metric.owners}
            self._families = {name: family for name, family in self._families.items() if family.owners}

    def collect(self) -> Iterator[PrometheusFamily]:
        with self._lock:
            families = [_exposed(family) for family in self._families.values() if family.metrics]
        yield from families

    def _find(self, family_name: str, labels: Mapping[str, str]) -> _Metric:
        family = self._families.get(family_name)
        metric = None if family is None else family.metrics.get(_key(labels))
        if metric is None:
            raise NotFound(f"metric family '{family_name}' no longer has a metric with labels {dict(labels)}")
        return metric


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def _exposed(family: _Family) -> PrometheusFamily:
    exposed = PrometheusFamily(family.name, family.description, family.kind)
    for metric in family.metrics.values():
        labels = dict(metric.labels)
        if family.kind != "histogram":
            exposed.add_sample(family.name, labels, metric.value)
            continue
        seen = 0
        for bound, count in zip((*metric.bounds, float("inf")), metric.counts, strict=True):
            seen += count
            exposed.add_sample(f"{family.name}_bucket", {**labels, "le": _bound_text(bound)}, seen)
        exposed.add_sample(f"{family.name}_count", labels, seen)
        exposed.add_sample(f"{family.name}_sum", labels, metric.value)
    return exposed


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else f"{bound:g}"
