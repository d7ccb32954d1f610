"""Samples requests to trace, and writes their traces to files, or sends them as spans to a collector.

A file is a JSON array that is complete at any time: each trace overwrites the closing bracket, so a crash loses no
traces. A separate thread writes, so the event loop does not wait for the disk.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from llmserve.frontends.shared.request_context import current_request
from llmserve.frontends.shared.trace_context import parent_of, request_span
from llmserve.frontends.shared.trace_settings import (
    Destination,
    TraceSettings,
    Update,
    describe,
    parse_update,
    with_values,
)
from llmserve.serving.instruments.spans import Span, spans_of
from llmserve.serving.instruments.trace import Record, Trace

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sampler:
    """Counts the requests of one model that has its own settings, or of all other models."""

    settings: TraceSettings
    num_seen: int = 0
    num_left: int = field(init=False)  # -1: no limit

    def __post_init__(self) -> None:
        self.num_left = self.settings.count

    def picks(self) -> bool:
        """Whether to trace the next request."""
        if not self.settings.levels or self.num_left == 0 or self.settings.rate == 0:
            return False
        self.num_seen += 1
        if self.num_seen % self.settings.rate:
            return False
        self.num_left -= self.num_left > 0
        return True


class SpanSink(Protocol):
    """The destination of spans, instead of files."""

    def export(self, spans: Iterable[Span]) -> None:
        """Called in a thread; does not wait."""
        ...

    def close(self) -> None:
        """Send pending spans, but only for a short time."""
        ...


class Tracer:
    """Writes traces to `file` ("": to none), or to `spans` instead. All calls are on the event loop."""

    def __init__(self, file: str = "", start: TraceSettings | None = None, spans: SpanSink | None = None) -> None:
        self._file = _TraceFile(file)
        self._spans = spans
        self._destination = Destination(file, exports_spans=spans is not None)
        self._start = start or TraceSettings()
        self._own: dict[str, dict[str, object]] = {"": {}}  # model, or "" for the server -> the fields set for it
        self._samplers = {"": _Sampler(self._start)}
        self._ids = itertools.count(1)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace-writer")

    def update(self, model: str, update: Update) -> None:
        """Change the settings of a model, or of the server (""): all or none. Sampling restarts."""
        values, cleared = parse_update(update)
        own = {name: value for name, value in self._own.get(model, {}).items() if name not in cleared} | values
        chosen = {name: fields for name, fields in {**self._own, model: own}.items() if fields or not name}
        server = with_values(self._start, chosen[""], self._destination)
        settings = {name: with_values(server, fields, self._destination) for name, fields in chosen.items()}
        kept = {name: self._samplers[name] for name in settings if model not in ("", name) and name in self._samplers}
        self._own = chosen
        self._samplers = {name: _Sampler(value) for name, value in settings.items()} | kept

    def describe(self, model: str = "") -> dict[str, str | list[str]]:
        """The effective settings of a model, or the server's."""
        sampler = self._samplers.get(model) or self._samplers[""]
        return describe(sampler.settings, sampler.num_left, self._destination)

    def sample(self, model: str) -> Trace | None:
        """A trace for the current request; None if it is not sampled."""
        sampler = self._samplers.get(model) or self._samplers[""]
        levels = sampler.settings.levels
        if not levels:
            return None
        context = current_request()
        parent = None if self._spans is None or context is None else parent_of(context.header)
        if not (sampler.picks() if parent is None else parent.is_sampled):
            return None
        trace = Trace(self._ids, timestamps="TIMESTAMPS" in levels, tensors="TENSORS" in levels)
        trace.request_id = "" if context is None else context.id
        if self._spans is not None:
            trace.request = request_span(context, parent)
            trace.ids_of_span = trace.request.ids.child()
        return trace

    def finish(self, model: str, trace: Trace) -> None:
        """Write or export the trace of a completed request."""
        settings = (self._samplers.get(model) or self._samplers[""]).settings
        if self._spans is not None:
            self._writer.submit(self._export, trace, time.monotonic_ns())
        elif self._file.path:
            self._writer.submit(lambda: self._file.append(trace.records(), settings.log_frequency))

    def close(self) -> None:
        """Write all pending traces."""
        self._writer.shutdown()
        if self._spans is not None:
            self._spans.close()

    def _export(self, trace: Trace, ended_ns: int) -> None:
        assert self._spans is not None
        try:
            self._spans.export(spans_of(trace, ended_ns))
        except Exception:  # border: the thread and requests continue
            logger.exception("a trace could not be exported")


class _TraceFile:
    """Only the writer's thread uses it, except for `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._number = 0  # of the current file, if traces are split over several
        self._num_traces = 0  # in the current file
        self._has_failed = False

    def append(self, records: list[Record], log_frequency: int) -> None:
        """Write `log_frequency` traces per file; 0: all to one file."""
        if not records:
            return
        if log_frequency and self._num_traces >= log_frequency:
            self._number += 1
            self._num_traces = 0
        path = Path(f"{self.path}.{self._number}" if log_frequency else self.path)
        try:
            self._write(path, ",".join(json.dumps(record, separators=(",", ":")) for record in records))
            self._num_traces += bool(log_frequency)
            self._has_failed = False
        except OSError as error:  # a full disk must not stop the thread
            if not self._has_failed:
                logger.error("cannot write traces; they are lost until there is space: %s", error)
            self._has_failed = True

    def _write(self, path: Path, text: str) -> None:
        """Append to the file. Raises `OSError` after restoring the file's old content."""
        with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
            size = file.seek(0, 2)
            start = size - 1 if size > 1 else 0
            data = b"%b%b]" % (b"," if start else b"[", text.encode())
            file.seek(start)
            try:
                while data:  # a disk that fills up accepts a part, and fails at the next one
                    data = data[file.write(data) :]
            except OSError:
                file.seek(start)
                file.write(b"]"[:start])  # restores the bracket, which needs no space
                file.truncate(start + bool(start))
                raise
