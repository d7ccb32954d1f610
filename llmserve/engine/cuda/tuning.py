"""Times the tactics of a CUDA engine's products under real conditions: with its weights, in graphs, as in steps.

A tactic whose bits differ from the build's choice is left out, because no cache may change a result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.cuda.device import Graph, HostMemory
from llmserve.engine.cuda.layout import DTYPES, ITEM_BYTES, Address, Launch, Room
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.cuda.tactics import Layer, machine_of, tuned_launches, versions
from llmserve.engine.tactics import TacticCache
from llmserve.progress import Progress

logger = logging.getLogger(__name__)
LEAST_SECONDS = 0.02  # bytes of weights in a trial
TRIALS = 3
LEAST_LAUNCHES = 16  # in a graph: with only a few short ones, its start would matter
CHECKED_ROWS = 256  # their bits represent those of more rows


def time_tactics(runner: CudaRunner, progress: Progress, clock: Callable[[], float] = perf_counter) -> TacticCache:
    """Time every layer with several tactics; `clock` is in seconds. Nothing else may run on the device."""
    header, layers, bench = runner.header, tuned_launches(runner.header), _Bench(runner, clock)
    weights = {tensor.name: tensor.num_bytes for tensor in header.tensors}

    def num_bytes(launches: Sequence[Launch]) -> int:
        """Bytes read in all trials, each counted once."""
        read = sum(weights.get(address.name, 0) for launch in launches for address in launch.arguments)
        return read * len(versions(header, launches[0]))

    progress.phase("time tactics", sum(num_bytes(launches) for _, launches in layers.values()))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for layer, (num_rows, launches) in layers.items():
        found.setdefault(layer.name, {})[str(layer.rows)] = bench.timings(layer, launches, num_rows)
        progress.advance(layer.name, num_bytes(launches))
    return TacticCache(machine_of(runner.device), found)


class _Bench:
    def __init__(self, runner: CudaRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._staging: HostMemory = np.empty(0, np.uint8)

    def timings(self, layer: Layer, launches: Sequence[Launch], num_rows: int) -> dict[str, float]:
        """Microseconds per launch, by tactic; the device cycles through all weights of the kind, as in a step."""
        runner, by_launch = self._runner, [versions(self._runner.header, launch) for launch in launches]
        wanted, found = None, {}
        for name, launch in by_launch[0].items():
            made = self._made(launch, min(num_rows, CHECKED_ROWS))
            wanted = made if wanted is None else wanted
            if made != wanted:
                logger.warning("%s in %s produces different bits on this device, so it is not used", layer.name, name)
                continue
            ours = [known[name] for known in by_launch] * -(-LEAST_LAUNCHES // len(by_launch))
            found[name] = round(1e6 * self._seconds(runner.capture(ours, num_rows)) / len(ours), 2)
        return found

    def _seconds(self, graph: Graph) -> float:
        """Seconds of a run: the shortest of a few trials of many runs each; the first run is not counted."""
        device, count = self._runner.device, 1
        found: list[float] = []
        device.run(graph)
        device.synchronize()
        while len(found) < TRIALS:
            began = self._clock()
            for _ in range(count):
                device.run(graph)
            device.synchronize()
            seconds = self._clock() - began
            if seconds < LEAST_SECONDS:
                count *= 2
            else:
                found.append(seconds / count)
        return min(found)

    def _made(self, launch: Launch, num_rows: int) -> bytes:
        """Its output for random numbers, with all rows."""
        runner, rng = self._runner, np.random.default_rng(0)
        kernel = runner.header.kernels[launch.kernel]
        places = dict(zip((name for name, _ in kernel.types), launch.arguments, strict=True))
        output = "parts" if "parts" in places else "y"
        for name, type_ in sorted(kernel.types, key=lambda pair: pair[0] != output):  # a residual may lie where y does
            if places[name].room == Room.BUFFER.value:
                self._fill(places[name], type_, num_rows, rng)
        constants, item_bytes = dict(kernel.constants), ITEM_BYTES[DTYPES[dict(kernel.types)[output]]]
        row_bytes = int(constants["NUM_COLUMNS"]) * item_bytes
        if output == "parts":
            pieces, piece_bytes = int(constants["SEGMENTS"]), int(constants["MAX_ROWS"]) * row_bytes
            used_bytes = num_rows * row_bytes
        else:
            pieces, piece_bytes, used_bytes = num_rows, int(constants["Y_STRIDE"]) * item_bytes, row_bytes
        runner.device.run(runner.capture([launch], num_rows))
        made = self._staged((pieces - 1) * piece_bytes + used_bytes)
        runner.device.read(made, runner.place(places[output]))
        runner.device.synchronize()
        return b"".join(made[begin * piece_bytes :][:used_bytes].tobytes() for begin in range(pieces))

    def _fill(self, place: Address, type_: str, num_rows: int, rng: np.random.Generator) -> None:
        """Fill all rows of an argument's buffer with numbers of its type."""
        num_bytes = self._runner.header.buffers[int(place.name)] * num_rows
        memory = self._staged(num_bytes)
        dtype = np.dtype(DTYPES[type_])
        count = num_bytes // dtype.itemsize
        is_integer = np.issubdtype(dtype, np.integer)
        values: NDArray[Any] = rng.integers(-127, 128, count) if is_integer else rng.standard_normal(count, np.float32)
        values = values.astype(dtype)
        memory[: values.nbytes] = values.view(np.uint8)
        self._runner.device.write(self._runner.place(place._replace(offset=0)), memory)
        self._runner.device.synchronize()

    def _staged(self, num_bytes: int) -> HostMemory:
        if len(self._staging) < num_bytes:
            self._staging = self._runner.device.host_memory(num_bytes)
        return self._staging[:num_bytes]
