"""Records the results of a lowering: launches and their kernels, tensors, scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.targets.cuda.tiles import ProductTile
from llmserve.engine.cuda.layout import (
    DTYPES,
    ITEM_BYTES,
    TYPES,
    Address,
    Extent,
    Kernel,
    Launch,
    PlacedTensor,
    Room,
    StepPart,
    Tactic,
)
from llmserve.models.number_formats import FLOAT32

STRIDE_BYTES = 16  # loaded at once by a thread
COLUMNS_OF_WARP = 256
ANY_ROWS = (1, 1 << 30)
ONE = Extent()
ROWS = Extent(1)

Constants: TypeAlias = Mapping[str, int | float | bool | str]


@dataclass(frozen=True, slots=True)
class Argument:
    """An address, what it points to, and whether it is a multiple of 16."""

    address: Address
    type: str
    is_aligned: bool = True

    def behind(self, count: int) -> Argument:
        """The address `count` items further on."""
        offset = count * ITEM_BYTES[DTYPES[self.type]]
        address = self.address._replace(offset=self.address.offset + offset)
        return Argument(address, self.type, self.is_aligned and offset % STRIDE_BYTES == 0)


class Recorder:
    """Records launches in order. Equal kernels are stored once, and so are tensors of equal constants."""

    def __init__(self, columns: int) -> None:
        self._columns = columns  # columns in a tile of ops that process each row separately
        self._kernels: dict[Kernel, int] = {}
        self.part = StepPart.BODY  # the part of the step that the following launches belong to
        self.launches: list[Launch] = []
        self.tactics: dict[int, tuple[Tactic, ...]] = {}  # by kernel
        self.tensors: dict[str, PlacedTensor] = {}
        self.constants: dict[str, NDArray[np.float32]] = {}
        self.scratch_bytes = 0

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._kernels)

    def launch(
        self, function: str, arguments: Mapping[str, Argument], constants: Constants,
        grid: tuple[Extent, Extent, Extent], *, tile: ProductTile | None = None, num_warps: int = 4,
        num_stages: int = 3, most_registers: int = 0, rows: tuple[int, int] = ANY_ROWS, half_on: tuple[str, ...] = (),
    ) -> int:  # fmt: skip
        """Records a launch for the smallest to the largest number of rows in `rows`. Returns its kernel's number."""
        number = self._kernel(
            function, arguments, constants,
            num_warps=tile.num_warps if tile else num_warps,
            num_stages=tile.num_stages if tile else num_stages,
            most_registers=most_registers, half_on=half_on,
        )  # fmt: skip
        addresses = tuple(argument.address for argument in arguments.values())
        self.launches.append(Launch(number, addresses, grid, self.part.value, *rows))
        return number

    def tactic(
        self, of: int, function: str, arguments: Mapping[str, Argument], constants: Constants,
        grid: tuple[Extent, Extent, Extent], tile: ProductTile,
    ) -> None:  # fmt: skip
        """Records an alternative to kernel `of`."""
        number = self._kernel(
            function, arguments, constants, num_warps=tile.num_warps, num_stages=tile.num_stages, most_registers=0
        )
        known, found = self.tactics.get(of, ()), Tactic(number, grid)
        self.tactics[of] = known if found in known else (*known, found)

    def _kernel(
        self, function: str, arguments: Mapping[str, Argument], constants: Constants, *, num_warps: int,
        num_stages: int, most_registers: int, half_on: tuple[str, ...] = (),
    ) -> int:  # fmt: skip
        kernel = Kernel(
            function,
            types=tuple((name, argument.type) for name, argument in arguments.items()),
            unaligned=tuple(name for name, argument in arguments.items() if not argument.is_aligned),
            constants=tuple(sorted(constants.items())),
            num_warps=num_warps,
            num_stages=num_stages,
            most_registers=most_registers,
            half_on=half_on,
        )
        return self._kernels.setdefault(kernel, len(self._kernels))

    def by_columns(
        self, function: str, arguments: Mapping[str, Argument], constants: Any, width: int, of: Extent = ROWS,
        columns_of_warp: int = COLUMNS_OF_WARP,
    ) -> None:  # fmt: skip
        """Records a launch with a program for each row (or other unit) and tile of columns."""
        tile = min(self._columns, power_of_two(width))
        grid = (of, Extent(fixed=-(-width // tile)), ONE)
        num_warps = max(1, tile // columns_of_warp)
        self.launch(function, arguments, {**constants, "TILE_COLUMNS": tile}, grid, num_warps=num_warps)

    def scratch(self, *counts: int) -> tuple[Argument, ...]:
        """Float32 arrays, one after the other, for one launch and the next."""
        found, end = [], 0
        for count in counts:
            found.append(Argument(Address(Room.SCRATCH.value, "", end), TYPES[FLOAT32.name]))
            end += -(-4 * count // STRIDE_BYTES) * STRIDE_BYTES
        self.scratch_bytes = max(self.scratch_bytes, end)
        return tuple(found)

    def constant(self, kind: str, values: NDArray[np.float32]) -> Argument:
        """A tensor with `values`."""
        equal = (name for name, known in self.constants.items() if np.array_equal(known, values))
        name = next(equal, f"{kind}.{len(self.constants)}")
        self.constants.setdefault(name, values)
        return self.tensor(name, "float32", 1, values.size)

    def tensor(self, name: str, dtype: str, rows: int, cols: int) -> Argument:
        return self.placed(PlacedTensor(name, dtype, rows, cols))

    def placed(self, tensor: PlacedTensor) -> Argument:
        assert self.tensors.setdefault(tensor.name, tensor) == tensor
        return Argument(Address(Room.TENSOR.value, tensor.name), TYPES[tensor.dtype])


def power_of_two(width: int) -> int:
    """The smallest power of two that is not smaller than this."""
    return 1 << (width - 1).bit_length()
