"""`--trace-config` of `llmserve serve`: what is traced from the start, and where traces go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmserve.errors import InvalidArgument, LlmserveError, raise_problems
from llmserve.frontends.shared.trace_settings import MODE, TraceSettings, parse_update, with_values
from llmserve.frontends.shared.tracer import Tracer

SETTINGS = {"rate": "trace_rate", "level": "trace_level", "count": "trace_count", "log-frequency": "log_frequency"}
KNOWN = "known: mode=triton, triton,file=PATH, triton,log-frequency=N, rate=N, level=TIMESTAMPS, level=TENSORS, count=N"


def make_tracer(options: Sequence[str]) -> Tracer:
    """From `KEY=VALUE` and `triton,KEY=VALUE` texts. Raises `InvalidArgument` with everything that is wrong."""
    values: dict[str, str | list[str]] = {}
    file = ""
    problems: list[str] = []
    for option in options:
        key, equals, value = option.removeprefix(f"{MODE},").partition("=")
        if equals and key == "file":
            file = value
        elif equals and key == "level":
            values["trace_level"] = [*values.get("trace_level", []), value]
        elif equals and key in SETTINGS:
            values[SETTINGS[key]] = value
        elif option.startswith("opentelemetry") or (key == "mode" and value != MODE):
            problems.append(f"{option}: only mode {MODE} is there, which writes files")
        elif key != "mode":
            problems.append(f"{option}: {KNOWN}")
    if file and not Path(file).absolute().parent.is_dir():
        problems.append(f"file={file}: there is no directory {Path(file).absolute().parent}")
    settings = TraceSettings()
    try:
        settings = with_values(settings, parse_update(values)[0], file)
    except LlmserveError as error:
        problems.append(str(error))
    raise_problems(InvalidArgument, "--trace-config is wrong", problems)
    return Tracer(file, settings)
