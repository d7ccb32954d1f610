"""Settings of request traces, parsed from clients' strings. A model's own values override the server's.

trace_level   OFF, or TIMESTAMPS and TENSORS
trace_rate    every n-th request is traced; 0 (for spans only): only requests whose client traces them
trace_count   the number of remaining traces; -1: no limit
log_frequency a numbered file for every n traces; 0: one file
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from llmserve.errors import InvalidArgument, Unsupported

LEVELS = ("TIMESTAMPS", "TENSORS")
OFF = "OFF"
MAX_UINT32 = 2**32 - 1
MAX_INT32 = 2**31 - 1
NUMBERS = {"trace_rate": (0, MAX_UINT32), "trace_count": (-1, MAX_INT32), "log_frequency": (0, MAX_UINT32)}
MODE, OPENTELEMETRY = "triton", "opentelemetry"

# name -> value as text, a list for trace_level; None: clear the value
Update: TypeAlias = Mapping[str, str | Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of traces: files with this path, or spans to a collector."""

    file: str = ""  # "": no file
    exports_spans: bool = False


@dataclass(frozen=True, slots=True)
class TraceSettings:
    levels: tuple[str, ...] = ()  # empty: OFF
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0

    def problem(self, destination: Destination) -> str:
        """The problem with these settings; "" if they are valid, or tracing is off."""
        if not self.levels:
            return ""
        if destination.exports_spans:
            return "spans cannot contain tensors: leave the level TENSORS out" if "TENSORS" in self.levels else ""
        if not destination.file:
            return "trace file name is not given: start the server with --trace-config triton,file=PATH"
        return "sample rate must be non-zero" if self.rate == 0 else ""


FIELDS = {"trace_level": "levels", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
SETTINGS = (*FIELDS, "trace_file")  # names for clients; others are ignored, as in Triton


def parse_update(update: Update) -> tuple[dict[str, object], set[str]]:
    """The fields of `TraceSettings` to set, and those to clear. Other names are ignored."""
    if "trace_file" in update:
        raise Unsupported("trace file location can not be updated through network protocol")
    values: dict[str, object] = {}
    cleared: set[str] = set()
    for name, value in update.items():
        if name not in FIELDS:
            continue
        if value is None:
            cleared.add(FIELDS[name])
        elif isinstance(value, str):
            values[FIELDS[name]] = _parse_number(name, value)
        elif (levels := _parse_levels(value)) is not None:
            values["levels"] = levels
    return values, cleared


def with_values(base: TraceSettings, values: Mapping[str, object], destination: Destination) -> TraceSettings:
    """`base` with some fields set; raises if the result is invalid."""
    made = replace(base, **values)  # type: ignore[arg-type]  # made by `parse_update`
    if problem := made.problem(destination):
        raise InvalidArgument(f"Attempting to set invalid trace setting :{problem}")
    return made


def describe(settings: TraceSettings, remaining: int, destination: Destination) -> dict[str, str | list[str]]:
    """The settings for clients, all as text."""
    return {
        "trace_level": list(settings.levels) or [OFF],
        "trace_rate": str(settings.rate),
        "trace_count": str(remaining),
        "log_frequency": str(settings.log_frequency),
        "trace_file": destination.file,
        "trace_mode": OPENTELEMETRY if destination.exports_spans else MODE,
    }


def _parse_levels(names: Sequence[str]) -> tuple[str, ...] | None:
    """The levels; None, which changes nothing, if no level is named."""
    if OFF in names:
        if len(names) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return ()
    unknown = [name for name in names if name not in LEVELS]
    if unknown:
        raise InvalidArgument(f"unknown trace level {', '.join(unknown)}: expected OFF, or {' and '.join(LEVELS)}")
    return tuple(level for level in LEVELS if level in names) or None


def _parse_number(name: str, text: str) -> int:
    low, high = NUMBERS[name]
    try:
        number = int(text)
    except ValueError:
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}") from None
    if name == "trace_count" and number < low:
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, got: {number}")
    if not low <= number <= high:
        raise InvalidArgument(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {number}")
    return number
