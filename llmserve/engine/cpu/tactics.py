"""Tactics of linear layers: what was measured for which shape, kept in `model.cache`, and which one each layer uses.

A tactic chooses how a layer's rows and outputs are cut into register tiles. It decides speed and never a bit of a
result, so a cache from another machine, or none, is no error: the library's defaults are used.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve import __version__
from llmserve.engine.artifact import CACHE_FILE
from llmserve.engine.cpu.layout import LinearShape, read_linear_layers
from llmserve.engine.native.library import chosen_isa, load_library
from llmserve.engine.runtime import TacticChoice

FORMAT_VERSION = 2  # goes up with kernels that are as fast no more
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # a bucket holds the row counts up to it; the last one all above too
WORTHWHILE = 0.97  # a tactic replaces the default only when it needs less than this part of its time
TIMED_COLUMNS = 2048  # panels are alike: a wide layer is timed on a part


@dataclass(frozen=True, slots=True)
class Machine:
    """What timings depend on."""

    cpu: str
    isa: str
    llmserve: str = __version__

    @classmethod
    def here(cls, isa: str = "") -> Machine:
        return cls(cpu_name(), chosen_isa(isa))


@dataclass(frozen=True, slots=True)
class TacticCache:
    """Microseconds by shape, row bucket and tactic."""

    machine: Machine
    microseconds: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, machine: Machine) -> TacticCache:
        """The timings in `path` when they were made on this machine; empty when not, or when there are none."""
        try:
            content = json.loads(path.read_text())
            if content["format_version"] == FORMAT_VERSION and Machine(**content["machine"]) == machine:
                return cls(machine, _checked(content["microseconds"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # timings can be made again, and nothing but speed depends on them
        return cls(machine)

    def save(self, path: Path) -> None:
        content = {
            "format_version": FORMAT_VERSION,
            "machine": {name: getattr(self.machine, name) for name in ("cpu", "isa", "llmserve")},
            "microseconds": self.microseconds,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def timings(self, shape: LinearShape, rows: int) -> Mapping[str, float]:
        """Tactic -> microseconds for a bucket of rows; empty when nothing was measured."""
        return self.microseconds.get(str(shape), {}).get(str(rows), {})


def _checked(microseconds: Any) -> dict[str, dict[str, dict[str, float]]]:
    return {
        str(shape): {
            str(rows): {str(tactic): float(value) for tactic, value in timings.items()}
            for rows, timings in buckets.items()
        }
        for shape, buckets in microseconds.items()
    }


def choose(cache: TacticCache, shape: LinearShape) -> list[TacticChoice]:
    """One choice per row bucket: the fastest that was measured, or the default where it is about as good."""
    names, defaults = load_library().tactics(cache.machine.isa, shape.weight_type)
    return [
        _choice(names, names[default], rows, cache.timings(shape, rows))
        for rows, default in zip(ROW_BUCKETS, defaults, strict=True)
    ]


def _choice(names: Sequence[str], default: str, rows: int, timings: Mapping[str, float]) -> TacticChoice:
    known = {name: value for name, value in timings.items() if name in names}
    if default not in known:
        return TacticChoice(rows, default, names.index(default), "default, not measured here")
    best = min(known, key=lambda name: known[name])
    if len(known) == 1:
        return TacticChoice(rows, default, names.index(default), "the only one")
    if known[best] >= WORTHWHILE * known[default]:
        reason = f"default, {known[default]:.0f} us; no other is faster"
        return TacticChoice(rows, default, names.index(default), reason)
    reason = f"{known[best]:.0f} us; default {default} {known[default]:.0f} us"
    return TacticChoice(rows, best, names.index(best), reason)


def tactic_table(engine_file: Path, machine: Machine) -> bytes:
    """The tactic of every operation and row bucket, from the cache beside the engine file."""
    cache = TacticCache.load(engine_file.with_name(CACHE_FILE), machine)
    num_ops, layers = read_linear_layers(engine_file)
    chosen = {shape: bytes(choice.index for choice in choose(cache, shape)) for shape in set(layers.values())}
    not_linear = bytes(len(ROW_BUCKETS))
    return b"".join(chosen[layers[index]] if index in layers else not_linear for index in range(num_ops))


def time_tactics(engine_file: Path, known: TacticCache, advance: Callable[[int], None]) -> TacticCache:
    """Timings of every candidate for every shape of the engine; what `known` has is not timed again.

    `advance` is told how many of `num_timed_bytes` are done since the last call.
    """
    library, isa = load_library(), known.machine.isa
    microseconds: dict[str, dict[str, Mapping[str, float]]] = {}
    for shape in linear_shapes(engine_file):
        names, _ = library.tactics(isa, shape.weight_type)
        size = (shape.depth, min(shape.columns, TIMED_COLUMNS))
        buckets = microseconds.setdefault(str(shape), {})
        for rows in ROW_BUCKETS:
            buckets[str(rows)] = known.timings(shape, rows)
            if set(buckets[str(rows)]) != set(names):
                seconds = [library.time_tactic(isa, shape.weight_type, size, rows, i) for i in range(len(names))]
                buckets[str(rows)] = {name: round(1e6 * value, 1) for name, value in zip(names, seconds, strict=True)}
            advance(_timed_bytes(shape))
    return TacticCache(known.machine, microseconds)


def linear_shapes(engine_file: Path) -> list[LinearShape]:
    """The distinct shapes of the linear layers, in order."""
    return list(dict.fromkeys(read_linear_layers(engine_file)[1].values()))


def num_timed_bytes(engine_file: Path) -> int:
    """Bytes of weights in all trials of `time_tactics`, each counted once."""
    return sum(map(_timed_bytes, linear_shapes(engine_file))) * len(ROW_BUCKETS)


def _timed_bytes(shape: LinearShape) -> int:
    return shape.depth * min(shape.columns, TIMED_COLUMNS) * shape.weight_type.bits // 8


def cpu_name() -> str:
    """The processor's model, as the system names it."""
    try:
        return _model(Path("/proc/cpuinfo").read_text()) or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _model(cpuinfo: str) -> str:
    """What tells models apart, of the first processor: a name on x86, numbers on ARM."""
    facts = dict(line.split("\t", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if "\t" in line)
    names = ("model name", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
    return " ".join(facts[name].strip("\t: ") for name in names if name in facts)
