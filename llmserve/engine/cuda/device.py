"""The interface to a driver: memory, modules, launches and graphs of one GPU, in one order.

A device executes calls later, in order. Addresses are plain integers. `bindings.py`
implements it over NVIDIA's driver; tests over the interpreted kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Function: TypeAlias = Any
Graph: TypeAlias = Any
Event: TypeAlias = Any
HostMemory: TypeAlias = NDArray[np.uint8]


class Device(Protocol):
    """Raises ResourceExhausted (memory), EngineFileError (a binary), Unavailable (a device that is lost)."""

    @property
    def name(self) -> str: ...

    @property
    def architecture(self) -> str:
        """Like "sm_90"."""
        ...

    def free_bytes(self) -> int: ...

    def allocate(self, num_bytes: int) -> int:
        """Address of device memory, a multiple of 256."""
        ...

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Host memory that the device copies from and to directly; valid while the device is open."""
        ...

    def write(self, address: int, source: HostMemory) -> None:
        """`source` must not change until the write has been waited for."""
        ...

    def read(self, target: HostMemory, address: int) -> None:
        """The data is there once it has been waited for."""
        ...

    def clear(self, address: int, num_bytes: int) -> None: ...

    def load(self, binary: bytes, symbol: str, *, shared_bytes: int, num_arguments: int) -> Function: ...

    def launch(
        self, function: Function, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> None:
        """`arguments`: addresses, as many as the function was loaded with."""
        ...

    def capture(self) -> AbstractContextManager[Graph]:
        """Launches inside become the graph, and do not run. No other calls are allowed inside."""
        ...

    def run(self, graph: Graph) -> None: ...

    def make_event(self) -> Event: ...

    def record(self, event: Event) -> None:
        """Mark everything that has been requested so far."""
        ...

    def wait(self, event: Event) -> None:
        """Wait until the marked work is done; later work may still be running."""
        ...

    def synchronize(self) -> None:
        """Wait for everything."""
        ...

    def close(self) -> None:
        """Free everything. May be called again."""
        ...
