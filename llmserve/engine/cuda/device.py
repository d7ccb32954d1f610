"""The seam to a driver: memory, modules, launches and graphs of one GPU, in one order.

What is asked of a device happens later, in the order in which it was asked. Addresses are plain integers. `bindings.py`
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
        """Address of memory of the device, a multiple of 256."""
        ...

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Memory that the device copies from and to without help; as long as the device is open."""
        ...

    def write(self, address: int, source: HostMemory) -> None:
        """`source` stays as it is until it was waited for."""
        ...

    def read(self, target: HostMemory, address: int) -> None:
        """There when it was waited for."""
        ...

    def clear(self, address: int, num_bytes: int) -> None: ...

    def load(self, binary: bytes, symbol: str, *, shared_bytes: int, num_arguments: int) -> Function: ...

    def launch(
        self, function: Function, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> None:
        """`arguments`: addresses, as many as the function was loaded with."""
        ...

    def capture(self) -> AbstractContextManager[Graph]:
        """What is launched inside becomes the graph, and does not run. Nothing else may be asked for inside."""
        ...

    def run(self, graph: Graph) -> None: ...

    def make_event(self) -> Event: ...

    def record(self, event: Event) -> None:
        """From now on it stands for all that has been asked until now."""
        ...

    def wait(self, event: Event) -> None:
        """Until that has happened; what was asked behind it may be still to come."""
        ...

    def synchronize(self) -> None:
        """Wait for everything."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...
