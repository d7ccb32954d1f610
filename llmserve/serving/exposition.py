"""The text of `GET /metrics`, read from the models' statistics at each scrape.

A collector on a registry of its own, so that several cores can live in one process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from llmserve.metrics import METRICS
from llmserve.serving.backend import GaugeSample
from llmserve.serving.model import ServedModel


class ServerCollector(Collector):
    """Prometheus families of all loaded models and of this machine."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models
        psutil.cpu_percent(interval=None)  # starts the interval that the first scrape measures

    def collect(self) -> Iterator[Family]:
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for model in self._models():
            labels = {"model": model.name, "version": model.version}
            for name, own_labels, value in (*_statistics_samples(model), *model.gauges()):
                samples[name].append(({**labels, **own_labels}, value))
        for name, value in _machine_samples():
            samples[name].append(({}, value))
        for name, metric in METRICS.items():
            if name in samples:
                yield _family(name, metric.help, metric.kind, samples.pop(name))
        for name, undeclared in samples.items():
            yield _family(name, "Reported by a backend", "gauge", undeclared)


def metrics_text(registry: CollectorRegistry) -> str:
    """Prometheus text format. prometheus-client's own writer would append `_total` to the counters' names."""
    lines = []
    for family in registry.collect():
        lines.append(f"# HELP {family.name} {_escape(family.documentation)}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escape(value, quotes=True)}"' for key, value in sample.labels.items())
            lines.append(f"{sample.name}{{{labels}}} {_number(sample.value)}".replace("{} ", " "))
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escape(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _family(name: str, text: str, kind: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Family:
    family = Family(name, text, kind)
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def _statistics_samples(model: ServedModel) -> Iterator[GaugeSample]:
    statistics = model.statistics
    yield "nv_inference_request_success", {}, statistics.success.count
    for reason, count in statistics.failures.items():
        yield "nv_inference_request_failure", {"reason": reason.value}, count
    yield "nv_inference_count", {}, statistics.inference_count
    yield "nv_inference_exec_count", {}, statistics.execution_count
    yield "nv_inference_request_duration_us", {}, statistics.success.ns // 1000
    yield "nv_inference_queue_duration_us", {}, statistics.queue.ns // 1000
    yield "nv_inference_compute_input_duration_us", {}, statistics.compute_input.ns // 1000
    yield "nv_inference_compute_infer_duration_us", {}, statistics.compute_infer.ns // 1000
    yield "nv_inference_compute_output_duration_us", {}, statistics.compute_output.ns // 1000
    yield "nv_inference_pending_request_count", {}, model.num_pending


def _machine_samples() -> Iterator[tuple[str, float]]:
    memory = psutil.virtual_memory()
    yield "nv_cpu_utilization", psutil.cpu_percent(interval=None) / 100
    yield "nv_cpu_memory_total_bytes", memory.total
    yield "nv_cpu_memory_used_bytes", memory.used
