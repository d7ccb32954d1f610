"""Counters of one version of a model since it was loaded; all durations are in nanoseconds.

The scheduler fills in a `RequestTiming` per request; the model passes it to `ModelStatistics` when the request ends.
Everything happens on the event loop, so there are no locks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from tritonclient.grpc import service_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.instruments.latencies import Histogram, Summary
from llmserve.serving.instruments.metrics_settings import MetricsSettings

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)
SUMMARIZED = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class FailureReason(Enum):
    """Why a request failed. Values are the `reason` label of `nv_inference_request_failure`."""

    REJECTED = "REJECTED"  # refused or timed out in the queue
    CANCELED = "CANCELED"  # the client went away
    BACKEND = "BACKEND"  # the model answered with an error
    OTHER = "OTHER"


@dataclass(slots=True)
class RequestTiming:
    """How the time of one request was spent."""

    start_ns: int = field(default_factory=time.monotonic_ns)
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    first_response_ns: int = 0  # from the start to the first data; 0: there is none yet
    cache_ns: int | None = None  # to look up and store the answer; None: the model's answers are not cached
    cache_hit: bool = False  # answered from the cache; nothing ran

    def add(self, step: RequestTiming) -> None:
        """Add the time of a step to the time of its ensemble."""
        self.queue_ns += step.queue_ns
        self.input_ns += step.input_ns
        self.infer_ns += step.infer_ns
        self.output_ns += step.output_ns


@dataclass(slots=True)
class Duration:
    """A count and a total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def message(self) -> service_pb2.StatisticDuration:
        return service_pb2.StatisticDuration(count=self.count, ns=self.ns)


@dataclass(slots=True)
class BatchDurations:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


class ModelStatistics:
    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.last_inference_ms = 0  # Unix time
        self.inference_count = 0  # batch elements
        self.execution_count = 0
        self.success = Duration()
        self.failures = dict.fromkeys(FailureReason, 0)
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        self.batches: dict[int, BatchDurations] = {}
        self.summaries: dict[str, Summary] = {}  # by what is measured, in microseconds; empty: disabled
        self.cache_summaries: dict[str, Summary] = {}  # of hits and misses, in microseconds; empty: disabled
        self.first_responses: Histogram | None = None  # milliseconds; None: disabled

    def keep_distributions(self, settings: MetricsSettings, config: ModelConfig) -> None:
        """Record distributions of latencies, too, if `/metrics` shows them."""
        if settings.summary_latencies:
            self.summaries = {part: Summary() for part in SUMMARIZED}
            if config.response_cache.enable:
                self.cache_summaries = {"hit": Summary(), "miss": Summary()}
        if settings.histogram_latencies and config.model_transaction_policy.decoupled:
            self.first_responses = Histogram(first_response_bounds(config))

    def request_succeeded(self, timing: RequestTiming, batch_size: int) -> None:
        self.last_inference_ms = time.time_ns() // 1_000_000
        request_ns = time.monotonic_ns() - timing.start_ns
        self.success.add(request_ns)
        self.queue.add(timing.queue_ns)
        if self.summaries:
            self._summarize(request_ns, timing)
        if timing.cache_ns is not None:
            (self.cache_hit if timing.cache_hit else self.cache_miss).add(timing.cache_ns)
            if self.cache_summaries:
                self.cache_summaries["hit" if timing.cache_hit else "miss"].observe(timing.cache_ns // 1000)
        if timing.cache_hit:
            return
        self.inference_count += batch_size
        self.compute_input.add(timing.input_ns)
        self.compute_infer.add(timing.infer_ns)
        self.compute_output.add(timing.output_ns)

    def first_response(self, timing: RequestTiming) -> None:
        """Called with the first data of each request."""
        timing.first_response_ns = time.monotonic_ns() - timing.start_ns
        if self.first_responses is not None:
            self.first_responses.observe(timing.first_response_ns / 1e6)

    def _summarize(self, request_ns: int, timing: RequestTiming) -> None:
        computed = () if timing.cache_hit else (timing.input_ns, timing.infer_ns, timing.output_ns)
        for part, ns in zip(SUMMARIZED, (request_ns, timing.queue_ns, *computed), strict=False):
            self.summaries[part].observe(ns // 1000)

    def request_failed(self, timing: RequestTiming, reason: FailureReason) -> None:
        self.failures[reason] += 1
        self.fail.add(time.monotonic_ns() - timing.start_ns)

    def batch_executed(self, batch_size: int, *, input_ns: int, infer_ns: int, output_ns: int = 0) -> None:
        self.execution_count += 1
        durations = self.batches.get(batch_size)
        if durations is None:
            durations = self.batches[batch_size] = BatchDurations()
        durations.compute_input.add(input_ns)
        durations.compute_infer.add(infer_ns)
        durations.compute_output.add(output_ns)

    def message(self) -> service_pb2.ModelStatistics:
        """The statistics as a message of the statistics extension."""
        return service_pb2.ModelStatistics(
            name=self.name,
            version=self.version,
            last_inference=self.last_inference_ms,
            inference_count=self.inference_count,
            execution_count=self.execution_count,
            inference_stats=service_pb2.InferStatistics(
                success=self.success.message(),
                fail=self.fail.message(),
                queue=self.queue.message(),
                compute_input=self.compute_input.message(),
                compute_infer=self.compute_infer.message(),
                compute_output=self.compute_output.message(),
                cache_hit=self.cache_hit.message(),
                cache_miss=self.cache_miss.message(),
            ),
            batch_stats=[
                service_pb2.InferBatchStatistics(
                    batch_size=size,
                    compute_input=durations.compute_input.message(),
                    compute_infer=durations.compute_infer.message(),
                    compute_output=durations.compute_output.message(),
                )
                for size, durations in sorted(self.batches.items())
            ],
        )


def first_response_bounds(config: ModelConfig) -> tuple[float, ...]:
    """Bucket bounds in milliseconds: those that `model_metrics` of the config gives, or Triton's."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == FIRST_RESPONSE:
            return tuple(control.histogram_options.buckets)
    return FIRST_RESPONSE_BOUNDS_MS
