"""Which requests are traced, and the files that their traces go to.

A file is a JSON array and complete at any time: each trace is written over the closing bracket by a thread of its own,
so that neither the event loop waits for the disk nor a crash takes traces with it.
"""

from __future__ import annotations

import itertools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llmserve.frontends.shared.trace_settings import TraceSettings, Update, describe, parse_update, with_values
from llmserve.serving.observe.trace import Record, Trace

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sampler:
    """Counts the requests of one model with settings of its own, or of all the others."""

    settings: TraceSettings
    num_seen: int = 0
    num_left: int = field(init=False)  # -1: no limit

    def __post_init__(self) -> None:
        self.num_left = self.settings.count

    def picks(self) -> bool:
        """Whether the next request is to be traced."""
        if not self.settings.levels or self.num_left == 0:
            return False
        self.num_seen += 1
        if self.num_seen % self.settings.rate:
            return False
        self.num_left -= self.num_left > 0
        return True


class Tracer:
    """`file`: where traces go, "" being nowhere. All calls on the event loop."""

    def __init__(self, file: str = "", start: TraceSettings | None = None) -> None:
        self._file = _TraceFile(file)
        self._start = start or TraceSettings()
        self._own: dict[str, dict[str, object]] = {"": {}}  # model, or "" for the server -> the fields set for it
        self._samplers = {"": _Sampler(self._start)}
        self._ids = itertools.count(1)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trace-writer")

    def update(self, model: str, update: Update) -> None:
        """Change the settings of a model, or of the server (""); all or nothing. Sampling starts anew."""
        values, cleared = parse_update(update)
        own = {name: value for name, value in self._own.get(model, {}).items() if name not in cleared} | values
        chosen = {name: fields for name, fields in {**self._own, model: own}.items() if fields or not name}
        server = with_values(self._start, chosen[""], self._file.path)
        settings = {name: with_values(server, fields, self._file.path) for name, fields in chosen.items()}
        kept = {name: self._samplers[name] for name in settings if model not in ("", name) and name in self._samplers}
        self._own = chosen
        self._samplers = {name: _Sampler(value) for name, value in settings.items()} | kept

    def describe(self, model: str = "") -> dict[str, str | list[str]]:
        """The settings in force for a model, or the server's."""
        sampler = self._samplers.get(model) or self._samplers[""]
        return describe(sampler.settings, sampler.num_left, self._file.path)

    def sample(self, model: str) -> Trace | None:
        """A trace for the request that has just come, when it is its turn."""
        sampler = self._samplers.get(model) or self._samplers[""]
        if not sampler.settings.levels or not sampler.picks():
            return None
        levels = sampler.settings.levels
        return Trace(self._ids, timestamps="TIMESTAMPS" in levels, tensors="TENSORS" in levels)

    def finish(self, model: str, trace: Trace) -> None:
        """The request is over: its trace goes to the file."""
        settings = (self._samplers.get(model) or self._samplers[""]).settings
        if self._file.path:
            self._writer.submit(self._file.append, trace.records(), settings.log_frequency)

    def close(self) -> None:
        """Write what is still waiting to be written."""
        self._writer.shutdown()


class _TraceFile:
    """Used by the writer's thread only, but for `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._number = 0  # of the file, when traces are split over several
        self._num_traces = 0  # in it

    def append(self, records: list[Record], log_frequency: int) -> None:
        """`log_frequency` traces a file, or all in one when 0."""
        if not records:
            return
        if log_frequency and self._num_traces >= log_frequency:
            self._number += 1
            self._num_traces = 0
        path = Path(f"{self.path}.{self._number}" if log_frequency else self.path)
        try:
            self._write(path, ",".join(json.dumps(record, separators=(",", ":")) for record in records))
            self._num_traces += bool(log_frequency)
        except OSError as error:  # a full disk must not end the thread
            logger.error("cannot write traces: %s", error)

    def _write(self, path: Path, text: str) -> None:
        with path.open("r+b" if path.exists() else "w+b") as file:
            size = file.seek(0, 2)
            if size < 2:
                file.write(b"[" + text.encode() + b"]")
            else:
                file.seek(size - 1)
                file.write(b"," + text.encode() + b"]")
