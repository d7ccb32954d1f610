"""The text of `GET /metrics`, read from the models' statistics at each scrape.

The collector has a registry of its own, so that several cores can run in one process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from llmserve.metrics import METRICS
from llmserve.serving.backend import GaugeSample
from llmserve.serving.config.metric_tags import metric_labels
from llmserve.serving.instruments.latencies import Histogram, Summary
from llmserve.serving.instruments.metrics_settings import MetricsSettings
from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.model import ServedModel
from llmserve.serving.observe.machine import MachineSampler
from llmserve.serving.schedulers.response_cache import ResponseCache
from llmserve.tenant_counters import TenantCounters


class Sample(NamedTuple):
    family: str
    value: float
    labels: Mapping[str, str] = {}
    suffix: str = ""  # of the family's name: _count, _sum, _bucket


class ServerCollector(Collector):
    """Prometheus families of all loaded models, of the response cache, of tenants and of this machine."""

    def __init__(
        self,
        models: Callable[[], Iterable[ServedModel]],
        settings: MetricsSettings,
        cache: ResponseCache | None,
        more: Callable[[], Iterable[GaugeSample]] = lambda: (),
        tenants: Callable[[], Mapping[str, TenantCounters]] = dict,
    ) -> None:
        """`more`: samples that belong to no single model. `tenants`: counters of the current tenants, by name."""
        self._models = models
        self._more = more
        self._tenants = tenants
        self._settings = settings
        self._cache = cache
        self._machine = MachineSampler(settings.interval_s, cpu=settings.shows_cpu, gpu=settings.shows_gpu)

    def collect(self) -> Iterator[Family]:
        families: dict[str, list[Sample]] = defaultdict(list)
        for sample in self._samples():
            families[sample.family].append(sample)
        for name, metric in METRICS.items():
            if name in families:
                yield _family(name, metric.help, metric.kind, families.pop(name))
        for name, undeclared in families.items():
            yield _family(name, "Reported by a backend", "gauge", undeclared)

    def _samples(self) -> Iterator[Sample]:
        for model in self._models():
            labels = {"model": model.name, "version": model.version, **metric_labels(model.config)}
            for sample in self._model_samples(model):
                yield sample._replace(labels=_ordered({**labels, **sample.labels}))
        if self._cache is not None:
            yield from _cache_samples(self._cache)
        for name, more_labels, value in self._more():
            yield Sample(name, value, _ordered(more_labels))
        for name, counters in self._tenants().items():
            yield from _tenant_samples(name, counters)
        for name, machine_labels, value in self._machine.samples():
            yield Sample(name, value, machine_labels)

    def _model_samples(self, model: ServedModel) -> Iterator[Sample]:
        statistics = model.statistics
        yield from _count_samples(statistics)
        if self._settings.counter_latencies:
            yield from _duration_samples(statistics)
        yield Sample("nv_inference_pending_request_count", model.num_pending)
        yield Sample("nv_model_load_duration_secs", model.load_s)
        for part, summary in statistics.summaries.items():
            yield from _summary_samples(f"nv_inference_{part}_summary_us", summary, self._settings.quantiles)
        if statistics.first_responses is not None:
            yield from _histogram_samples("nv_inference_first_response_histogram_ms", statistics.first_responses)
        if self._cache is not None and model.config.response_cache.enable:
            yield from _model_cache_samples(statistics)
            for kind, summary in statistics.cache_summaries.items():
                yield from _summary_samples(f"nv_cache_{kind}_summary_per_model", summary, self._settings.quantiles)
        for name, labels, value in model.gauges():
            yield Sample(name, value, labels)
        for name, histogram in model.histograms.items():
            yield from _histogram_samples(name, histogram)


def _ordered(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Labels sorted by name, with `quantile` and `le` last, as in Triton's library."""
    return {name: labels[name] for name in sorted(labels, key=lambda name: (name in ("quantile", "le"), name))}


def metrics_text(registry: CollectorRegistry) -> str:
    """Prometheus text format. prometheus-client's own writer would append `_total` to the counters' names."""
    lines = []
    for family in registry.collect():
        lines.append(f"# HELP {family.name} {_escape(family.documentation)}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for sample in family.samples:
            labels = ",".join([f'{key}="{_escape(value, quotes=True)}"' for key, value in sample.labels.items()])
            shown = f"{{{labels}}}" if labels else ""
            lines.append(f"{sample.name}{shown} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escape(text: str, *, quotes: bool = False) -> str:
    if text.isidentifier():  # true for most, and this runs for each label of each sample
        return text
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _family(name: str, text: str, kind: str, samples: Iterable[Sample]) -> Family:
    family = Family(name, text, kind)
    for sample in samples:
        family.add_sample(name + sample.suffix, dict(sample.labels), sample.value)
    return family


def _count_samples(statistics: ModelStatistics) -> Iterator[Sample]:
    yield Sample("nv_inference_request_success", statistics.success.count)
    for reason, count in statistics.failures.items():
        yield Sample("nv_inference_request_failure", count, {"reason": reason.value})
    yield Sample("nv_inference_count", statistics.inference_count)
    yield Sample("nv_inference_exec_count", statistics.execution_count)


def _duration_samples(statistics: ModelStatistics) -> Iterator[Sample]:
    yield Sample("nv_inference_request_duration_us", statistics.success.ns // 1000)
    yield Sample("nv_inference_queue_duration_us", statistics.queue.ns // 1000)
    yield Sample("nv_inference_compute_input_duration_us", statistics.compute_input.ns // 1000)
    yield Sample("nv_inference_compute_infer_duration_us", statistics.compute_infer.ns // 1000)
    yield Sample("nv_inference_compute_output_duration_us", statistics.compute_output.ns // 1000)


def _summary_samples(family: str, summary: Summary, quantiles: tuple[float, ...]) -> Iterator[Sample]:
    yield Sample(family, summary.count, suffix="_count")
    yield Sample(family, summary.total, suffix="_sum")
    for quantile, value in zip(quantiles, summary.quantiles(quantiles), strict=True):
        yield Sample(family, value, {"quantile": f"{quantile:g}"})


def _histogram_samples(family: str, histogram: Histogram) -> Iterator[Sample]:
    buckets = histogram.cumulative()
    yield Sample(family, buckets[-1][1], suffix="_count")
    yield Sample(family, histogram.total, suffix="_sum")
    for bound, count in buckets:
        yield Sample(family, count, {"le": "+Inf" if math.isinf(bound) else f"{bound:g}"}, "_bucket")


def _model_cache_samples(statistics: ModelStatistics) -> Iterator[Sample]:
    yield Sample("nv_cache_num_hits_per_model", statistics.cache_hit.count)
    yield Sample("nv_cache_num_misses_per_model", statistics.cache_miss.count)
    yield Sample("nv_cache_hit_duration_per_model", statistics.cache_hit.ns // 1000)
    yield Sample("nv_cache_miss_duration_per_model", statistics.cache_miss.ns // 1000)


def _cache_samples(cache: ResponseCache) -> Iterator[Sample]:
    counters = cache.counters
    yield Sample("nv_cache_num_entries", len(cache))
    yield Sample("nv_cache_num_lookups", counters.num_lookups)
    yield Sample("nv_cache_num_hits", counters.num_hits)
    yield Sample("nv_cache_num_misses", counters.num_misses)
    yield Sample("nv_cache_num_evictions", counters.num_evictions)
    yield Sample("nv_cache_lookup_duration", counters.lookup_ns // 1000)
    yield Sample("nv_cache_insertion_duration", counters.insertion_ns // 1000)
    yield Sample("nv_cache_util", cache.utilization)


def _tenant_samples(name: str, counters: TenantCounters) -> Iterator[Sample]:
    """The samples of a tenant, for each model that it has used. Labels are in alphabetical order."""
    for model, requests in counters.requests.items():
        labels = {"key": name, "model": model}
        for outcome, count in requests.outcomes.items():
            yield Sample("llmserve_key_requests_total", count, {**labels, "outcome": outcome})
        for limit, count in requests.refusals.items():
            yield Sample("llmserve_key_refusals_total", count, {"key": name, "limit": limit, "model": model})
        yield Sample("llmserve_key_requests_in_flight", requests.num_in_flight, labels)
    for model, answers in counters.answers.items():
        labels = {"key": name, "model": model}
        yield Sample("llmserve_key_prompt_tokens_total", answers.prompt_tokens, labels)
        yield Sample("llmserve_key_generation_tokens_total", answers.generation_tokens, labels)
        yield Sample("llmserve_key_queue_time_seconds", answers.num_queued, labels, "_count")
        yield Sample("llmserve_key_queue_time_seconds", answers.queue_s, labels, "_sum")
        yield Sample("llmserve_key_preemptions_total", answers.num_preemptions, labels)
