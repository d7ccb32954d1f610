"""`--trace-config` of `llmserve serve`: what is traced from the start, and where traces are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.errors import InvalidArgument, LlmserveError, raise_problems
from llmserve.frontends.shared.span_export import ExportSettings, SpanExport
from llmserve.frontends.shared.trace_settings import (
    LEVELS,
    MODE,
    OPENTELEMETRY,
    Destination,
    TraceSettings,
    parse_update,
    with_values,
)
from llmserve.frontends.shared.tracer import Tracer

SETTINGS = {"rate": "trace_rate", "level": "trace_level", "count": "trace_count", "log-frequency": "log_frequency"}
BATCHES = {  # of spans, with the names of Triton and OpenTelemetry
    "bsp_max_queue_size": "max_queue_size",
    "bsp_max_export_batch_size": "max_export_batch_size",
    "bsp_schedule_delay": "schedule_delay_ms",
}
KNOWN = (
    "known: mode=triton, triton,file=PATH, triton,log-frequency=N, rate=N, level=TIMESTAMPS, level=TENSORS, count=N; "
    "mode=opentelemetry, opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE, "
    + ", ".join(f"opentelemetry,{name}=N" for name in BATCHES)
)


@dataclass(slots=True)
class _Given:
    """The options, and their problems."""

    mode: str = MODE
    file: str = ""
    url: str | None = None
    resource: dict[str, str] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    values: dict[str, str | list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, option: str) -> None:
        of_mode, comma, rest = option.partition(",")
        mode = of_mode if comma and of_mode in (MODE, OPENTELEMETRY) else ""
        key, equals, value = (rest if mode else option).partition("=")
        if not equals:
            self.problems.append(f"{option}: {KNOWN}")
        elif mode == OPENTELEMETRY:
            self._add_of_spans(option, key, value)
        elif key == "mode":
            self.mode = value
            if value not in (MODE, OPENTELEMETRY):
                self.problems.append(f"{option}: the modes are {MODE} and {OPENTELEMETRY}")
        elif key == "file":
            self.file = value
        elif key == "level":
            self.values["trace_level"] = [*self.values.get("trace_level", []), value]
        elif key in SETTINGS:
            self.values[SETTINGS[key]] = value
        else:
            self.problems.append(f"{option}: {KNOWN}")

    def _add_of_spans(self, option: str, key: str, value: str) -> None:
        name, equals, content = value.partition("=")
        if key == "url":
            self.url = value if "://" in value else f"http://{value}"
        elif key == "resource" and name and equals:
            self.resource[name] = content
        elif key in BATCHES and value.isdecimal():
            self.batches[BATCHES[key]] = int(value)
        else:
            self.problems.append(f"{option}: {KNOWN}")

    @property
    def exports_spans(self) -> bool:
        return self.mode == OPENTELEMETRY

    def check(self) -> None:
        """Find options that do not fit together."""
        of_spans = self.url is not None or self.resource or self.batches
        if of_spans and not self.exports_spans:
            self.problems.append(f"opentelemetry,...: this needs mode={OPENTELEMETRY}")
        if self.file and self.exports_spans:
            self.problems.append(f"file={self.file}: spans go to a collector, not into a file")
        elif self.file and not Path(self.file).absolute().parent.is_dir():
            self.problems.append(f"file={self.file}: there is no directory {Path(self.file).absolute().parent}")


def make_tracer(options: Sequence[str]) -> Tracer:
    """A tracer from `KEY=VALUE` and `MODE,KEY=VALUE` texts. Raises `InvalidArgument` with all problems."""
    given = _Given()
    for option in options:
        given.add(option)
    given.check()
    if given.exports_spans:  # a collector implies spans; in Triton they are off without a level
        given.values.setdefault("trace_level", [LEVELS[0]])
    settings = TraceSettings()
    destination = Destination(given.file, exports_spans=given.exports_spans)
    try:
        settings = with_values(settings, parse_update(given.values)[0], destination)
    except LlmserveError as error:
        given.problems.append(str(error))
    raise_problems(InvalidArgument, "--trace-config is invalid", given.problems)
    if not given.exports_spans:
        return Tracer(given.file, settings)
    return Tracer(start=settings, spans=SpanExport(ExportSettings(given.url, given.resource, **given.batches)))
