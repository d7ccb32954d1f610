"""Exports spans to a collector with OpenTelemetry's own library (extra `otel`): OTLP over HTTP.

The library has a bounded queue and a thread, so adding a span never blocks, and a slow or missing collector only loses
spans. The OTEL_* variables for headers, certificates and the resource apply.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from llmserve import __version__
from llmserve.errors import InvalidArgument
from llmserve.serving.instruments.spans import Span

EXPORT_TIMEOUT_S = 5.0  # for one request to the collector, with all retries
CLOSE_TIMEOUT_S = 3.0
SERVICE = "llmserve"


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """None: the library's default, or the value of an OTEL_* variable."""

    url: str | None = None
    resource: Mapping[str, str] = field(default_factory=dict)
    max_queue_size: int | None = None  # spans
    max_export_batch_size: int | None = None  # spans
    schedule_delay_ms: int | None = None


class SpanExport:
    def __init__(self, settings: ExportSettings) -> None:
        """Raises `InvalidArgument` if the library is not installed or refuses the settings."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise InvalidArgument("exporting spans requires OpenTelemetry: pip install 'llmserve[otel]'") from error
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # logs failures, but not every retry
        ours, given = {SERVICE_NAME: SERVICE, SERVICE_VERSION: __version__}, OTELResourceDetector().detect().attributes
        self._resource = Resource.create({**ours, **given, **settings.resource})
        self._scope = InstrumentationScope(SERVICE, __version__)
        try:
            self._exporter = OTLPSpanExporter(settings.url, timeout=EXPORT_TIMEOUT_S)
            self._processor = BatchSpanProcessor(
                self._exporter,
                max_queue_size=settings.max_queue_size,
                max_export_batch_size=settings.max_export_batch_size,
                schedule_delay_millis=settings.schedule_delay_ms,
            )
        except ValueError as error:
            raise InvalidArgument(f"spans cannot be exported with these settings: {error}") from error

    def export(self, spans: Iterable[Span]) -> None:
        """See `SpanSink`."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

        flags = TraceFlags(TraceFlags.SAMPLED)
        for span in spans:
            ids, state = span.ids, TraceState.from_header([span.state]) if span.state else TraceState()
            around = SpanContext(ids.trace_id, ids.parent_id, span.is_request, flags, state) if ids.parent_id else None
            failed = {"error.type": span.error} if span.error else {}
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    SpanContext(ids.trace_id, ids.span_id, False, flags, state),
                    parent=around,
                    resource=self._resource,
                    attributes={**span.attributes, **failed},
                    kind=SpanKind.SERVER if span.is_request else SpanKind.INTERNAL,
                    instrumentation_scope=self._scope,
                    status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                    start_time=span.began_ns,
                    end_time=span.ended_ns,
                )
            )

    def close(self) -> None:
        """See `SpanSink`. The library would wait for a missing collector, so this stops after a time limit."""
        closing = threading.Thread(target=self._processor.shutdown, name="span-export-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            # else its thread would continue to retry, span after span
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
