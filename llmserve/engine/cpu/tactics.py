"""Tactics of linear layers on the CPU: how they are timed, and which ones are used.

A tactic determines how a layer's rows and outputs are divided into register tiles.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

from llmserve.engine.cpu.layout import LinearShape, read_linear_layers
from llmserve.engine.directory.artifact import CACHE_FILE
from llmserve.engine.native.library import chosen_isa, load_library
from llmserve.engine.runtime import TacticChoice
from llmserve.engine.tactics import Machine, TacticCache, choose_tactic
from llmserve.scheduler.step_costs import RowTimes

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # a bucket has the row counts up to it; the last one also all above
TIMED_COLUMNS = 2048  # panels are alike, so only part of a wide layer is timed


def this_machine(isa: str = "") -> Machine:
    """`isa`: the instruction set, if not the best one."""
    return Machine(cpu_name(), chosen_isa(isa))


def choose(cache: TacticCache, shape: LinearShape) -> list[TacticChoice]:
    """One choice per row bucket: the fastest measured tactic, or the default if it is about as fast."""
    choices = []
    for rows in ROW_BUCKETS:
        names, default = load_library().tactics(cache.machine.kernels, shape.weight_type, rows)
        choices.append(choose_tactic(names, names[default], rows, cache.timings(str(shape), rows)))
    return choices


def tactic_table(engine_file: Path, machine: Machine) -> bytes:
    """The tactic of every operation and row bucket, from the cache next to the engine file."""
    cache = TacticCache.load(engine_file.with_name(CACHE_FILE), machine)
    num_ops, layers = read_linear_layers(engine_file)
    chosen = {shape: bytes(choice.index for choice in choose(cache, shape)) for shape in set(layers.values())}
    not_linear = bytes(len(ROW_BUCKETS))
    return b"".join(chosen[layers[index]] if index in layers else not_linear for index in range(num_ops))


def row_times(engine_file: Path, machine: Machine) -> RowTimes:
    """Microseconds of all linear layers by number of rows, never decreasing (where a layer seems to be faster with more
    rows, something else ran when it was timed); empty if not measured on this machine."""
    cache = TacticCache.load(engine_file.with_name(CACHE_FILE), machine)
    layers = read_linear_layers(engine_file)[1].values()
    times = [[_microseconds(cache, shape, rows) for rows in reversed(ROW_BUCKETS)] for shape in layers]
    if not times or not all(0 < time < math.inf for found in times for time in found):
        return ()
    totals = map(sum, zip(*(accumulate(found, min) for found in times), strict=True))
    return tuple(sorted(zip(reversed(ROW_BUCKETS), totals, strict=True)))


def _microseconds(cache: TacticCache, shape: LinearShape, rows: int) -> float:
    """Of the fastest tactic; 0: not measured."""
    return min(cache.timings(str(shape), rows).values(), default=0.0) * max(1, shape.columns / TIMED_COLUMNS)


def time_tactics(engine_file: Path, known: TacticCache, advance: Callable[[int], None]) -> TacticCache:
    """Time every candidate for every shape of the engine, except those in `known`.

    `advance` receives the part of `num_timed_bytes` that was done since the last call.
    """
    library, isa = load_library(), known.machine.kernels
    microseconds: dict[str, dict[str, Mapping[str, float]]] = {}
    for shape in linear_shapes(engine_file):
        size = (shape.depth, min(shape.columns, TIMED_COLUMNS))
        buckets = microseconds.setdefault(str(shape), {})
        for rows in ROW_BUCKETS:
            names, _ = library.tactics(isa, shape.weight_type, rows)
            buckets[str(rows)] = known.timings(str(shape), rows)
            if set(buckets[str(rows)]) != set(names):
                seconds = library.time_tactics(isa, shape.weight_type, size, rows, len(names))
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
    return shape.depth * min(shape.columns, TIMED_COLUMNS) * shape.weight_type.format.bits // 8


def cpu_name() -> str:
    """The processor's model, as named by the system."""
    try:
        return _model(Path("/proc/cpuinfo").read_text()) or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _model(cpuinfo: str) -> str:
    """What distinguishes models of the first processor: a name on x86, numbers on ARM."""
    facts = dict(line.split("\t", 1) for line in cpuinfo.split("\n\n")[0].splitlines() if "\t" in line)
    names = ("model name", "cpu family", "model", "CPU implementer", "CPU variant", "CPU part")
    return " ".join(facts[name].strip("\t: ") for name in names if name in facts)
