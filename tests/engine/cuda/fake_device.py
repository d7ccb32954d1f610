"""A device whose memory is the host's and whose launches run the kernels under Triton's interpreter.

`FakeCompiler` makes binaries that name their kernel, and `FakeDevice` is strict where a real driver is not: what lies
outside of an allocation, a wrong number of arguments, a use after the end are errors.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is declared

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from llmserve.builder.targets.cuda.compiler import PACKAGE, Compiled
from llmserve.engine.cuda.device import HostMemory
from llmserve.engine.cuda.layout import Kernel
from llmserve.errors import EngineFileError, ResourceExhausted
from tests.engine.cuda.quick_types import remember_types

HALVES = {"and.b32 $0, $1, 0x0F0F0F0F;": 0, "shr.b32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;": 4}  # and their first bit
COMPILERS_OWN = 2  # arguments that Triton adds
ALIGNMENT = 256
INTERPRETER = threading.Lock()  # there is one, whose state is global
WORD_TYPES = {
    "*fp32": "float32",
    "*fp16": "float16",
    "*bf16": "bfloat16",
    "*i32": "int32",
    "*i8": "int8",
    "*u8": "uint8",
}


class FakeCompiler:
    version = "interpreter"

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        for kernel in kernels:
            text = json.dumps({"architecture": architecture, **asdict(kernel)}).encode()
            symbol = kernel.function.rpartition(".")[2]
            yield Compiled(text, symbol, 32 * kernel.num_warps, 0, len(kernel.types) + COMPILERS_OWN, 0, 0)


@dataclass(frozen=True)
class FakeFunction:
    kernel: dict[str, Any]
    num_arguments: int


@dataclass
class FakeGraph:
    launches: list[tuple[FakeFunction, tuple[int, int, int], tuple[int, ...]]] = field(default_factory=list)


class Misuse(AssertionError):
    """What a real driver answers with an error, or with a wrong result."""


class Pointer:
    """What the interpreter takes for a tensor in the host's memory, as far as it looks at it."""

    def __init__(self, address: int, dtype: str) -> None:
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address

    def untyped_storage(self) -> Pointer:
        return self

    def new_empty(self, *size: int, device: str) -> Pointer:
        return Pointer(self._address, self.dtype)

    def cpu(self) -> Pointer:
        return self

    def nothing(self, *arguments: Any) -> None:
        """It is where it should be."""

    set_ = copy_ = storage_offset = size = stride = nothing


class FakeEvent:
    """How many things had been asked for."""

    position = 0


class FakeDevice:
    """Everything happens as late as it may: what is written is read from the host's memory when somebody waits."""

    name = "Interpreter"

    def __init__(self, architecture: str = "sm_90", total_bytes: int = 1 << 30, ordinal: int = 0) -> None:
        self.architecture = architecture
        self.ordinal = ordinal
        self._total_bytes = total_bytes
        self._memory: dict[int, NDArray[np.uint8]] = {}  # address -> with what keeps it alive
        self._raw: dict[int, NDArray[np.uint8]] = {}
        self._graph: FakeGraph | None = None
        self._asked: deque[Callable[[], None]] = deque()
        self._num_done = 0
        self.is_open = True
        self.num_launches = 0

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self._memory.values()))

    def free_bytes(self) -> int:
        return self._total_bytes - self.used_bytes

    def allocate(self, num_bytes: int) -> int:
        self._check_size(num_bytes)
        if num_bytes > self.free_bytes():
            raise ResourceExhausted(f"the GPU has no {num_bytes} bytes left")
        raw = np.full(num_bytes + 2 * ALIGNMENT, 0xFF, np.uint8)  # NaN, whatever the type
        begin = -raw.ctypes.data % ALIGNMENT
        memory = raw[begin : begin + num_bytes]
        address: int = memory.ctypes.data
        self._memory[address], self._raw[address] = memory, raw
        return address

    def host_memory(self, num_bytes: int) -> HostMemory:
        self._check_size(num_bytes)
        return np.zeros(num_bytes, np.uint8)

    def write(self, address: int, source: HostMemory) -> None:
        self._ask(lambda target: np.copyto(target, source), self._inside(address, len(source)))

    def read(self, target: HostMemory, address: int) -> None:
        self._ask(lambda source: np.copyto(target, source), self._inside(address, len(target)))

    def clear(self, address: int, num_bytes: int) -> None:
        self._ask(lambda target: target.fill(0), self._inside(address, num_bytes))

    def load(self, binary: bytes, symbol: str, *, shared_bytes: int, num_arguments: int) -> FakeFunction:
        self._check()
        try:
            kernel = json.loads(binary)
        except ValueError as error:
            raise EngineFileError(f"the kernel {symbol} cannot be loaded: {error}") from error
        if kernel["architecture"] != self.architecture or not kernel["function"].endswith(symbol):
            raise EngineFileError(f"the kernel {symbol} is none of this device")
        if num_arguments != len(kernel["types"]) + COMPILERS_OWN:
            raise Misuse(f"{symbol} does not have {num_arguments} arguments")
        return FakeFunction(kernel, num_arguments)

    def launch(
        self, function: FakeFunction, grid: tuple[int, int, int], threads: int, shared_bytes: int,
        arguments: Sequence[int],
    ) -> None:  # fmt: skip
        if self._graph is None:
            raise Misuse("a launch outside of a capture")
        if len(arguments) != function.num_arguments or any(arguments[-COMPILERS_OWN:]):
            raise Misuse(f"{function.kernel['function']} got {arguments}")
        if threads != 32 * function.kernel["num_warps"] or min(grid) < 1:
            raise Misuse(f"{function.kernel['function']} with {threads} threads on {grid}")
        for (name, _), address in zip(function.kernel["types"], arguments, strict=False):
            self._inside(address, 1)
            if name not in function.kernel["unaligned"] and address % 16:
                raise Misuse(f"{name} of {function.kernel['function']} is said to be a multiple of 16")
        self._graph.launches.append((function, grid, tuple(arguments)))

    @contextmanager
    def capture(self) -> Iterator[FakeGraph]:
        if self._graph is not None:
            raise Misuse("a capture in a capture")
        self._check()
        self._graph = FakeGraph()
        try:
            yield self._graph
        finally:
            self._graph = None

    def run(self, graph: FakeGraph) -> None:
        self._ask(self._run, graph)

    def _run(self, graph: FakeGraph) -> None:
        for function, grid, arguments in graph.launches:
            self.num_launches += 1
            run_kernel(function.kernel, grid, arguments[:-COMPILERS_OWN])

    def make_event(self) -> FakeEvent:
        self._check()
        return FakeEvent()

    def record(self, event: FakeEvent) -> None:
        self._check()
        event.position = self._num_done + len(self._asked)

    def wait(self, event: FakeEvent) -> None:
        self._check()
        while self._num_done < event.position:
            self._num_done += 1
            self._asked.popleft()()

    def synchronize(self) -> None:
        event = self.make_event()
        self.record(event)
        self.wait(event)

    def _ask(self, action: Callable[[Any], None], subject: Any) -> None:
        self._check()
        self._asked.append(partial(action, subject))

    def close(self) -> None:
        self._memory.clear()
        self._raw.clear()
        self.is_open = False

    def _check(self) -> None:
        if not self.is_open:
            raise Misuse("the device is closed")
        if self._graph is not None:
            raise Misuse("nothing but launches in a capture")

    def _check_size(self, num_bytes: int) -> None:
        self._check()
        if num_bytes < 1:
            raise Misuse("a driver gives no memory of no bytes")

    def _inside(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        for begin, memory in self._memory.items():
            if begin <= address and address + num_bytes <= begin + len(memory):
                return memory[address - begin : address - begin + num_bytes]
        raise Misuse(f"{num_bytes} bytes at {address:#x} are in no allocation")


def to_float32(handle: Any) -> NDArray[np.float32]:
    """The interpreter has no numbers of bfloat16: it keeps their bits."""
    if handle.dtype.scalar.is_bf16():
        widened: NDArray[np.float32] = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return widened
    converted: NDArray[np.float32] = handle.data.astype(np.float32)
    return converted


def dot_in_order(builder: Any, a: Any, b: Any, sums: Any, *ignored: Any) -> Any:
    """A product of tiles whose sums are taken in order, input by input: as a device does, whatever a tile is."""
    if sums.dtype.scalar.is_int():
        return TensorHandle(a.data.astype(np.int32) @ b.data.astype(np.int32) + sums.data, sums.dtype.scalar)
    left, right = (to_float32(handle) for handle in (a, b))
    total = sums.data.astype(np.float32)
    for place in range(left.shape[1]):
        total = total + left[:, place, None] * right[None, place, :]
    return TensorHandle(total, sums.dtype.scalar)


def assembly(builder: Any, text: str, constraints: str, operands: list[Any], *ignored: Any) -> Any:
    """What kernels have as text: sums of the products of four pairs of int8 in words, and halves of four bytes."""
    if (shift := HALVES.get(text)) is not None:
        handle = TensorHandle((operands[0].data.view(np.uint8) >> shift & 15).view(np.int8), tl.int8)
    else:
        assert text == "dp4a.s32.s32 $0, $1, $2, $3;", text
        left, right = (
            np.ascontiguousarray(each.data)[..., None].view(np.int8).astype(np.int32) for each in operands[:2]
        )
        handle = TensorHandle((left * right).sum(axis=-1, dtype=np.int32) + operands[2].data, operands[2].dtype.scalar)
    handle.get_result = lambda place: handle
    return handle


def run_kernel(kernel: dict[str, Any], grid: tuple[int, int, int], addresses: Sequence[int]) -> None:
    module, _, name = kernel["function"].rpartition(".")
    function = getattr(import_module(f"{PACKAGE}.{module}"), name)
    pointers = {
        argument: Pointer(address, WORD_TYPES[dtype])
        for (argument, dtype), address in zip(kernel["types"], addresses, strict=True)
    }
    with (
        INTERPRETER,
        catch_warnings(),
        np.errstate(all="ignore"),
        patch.object(InterpreterBuilder, "create_dot", dot_in_order),
        patch.object(InterpreterBuilder, "create_inline_asm", assembly),
    ):
        simplefilter("ignore")  # rows of no token may be anything
        function[grid](**pointers, **dict(kernel["constants"]))


CHANGE = interpreter._patch_lang
CHANGED: set[int] = set()


def change_once(function: Any) -> Any:
    """Triton's words mean what its interpreter makes of them, from now on: it would change them anew for each call."""
    if (module := id(function.__globals__)) not in CHANGED:
        CHANGED.add(module)
        CHANGE(function)
    return Unchanged


class Unchanged:
    @staticmethod
    def restore() -> None:
        """Nothing else in this process wants them otherwise: what compiles does so in others."""


interpreter._patch_lang = change_once
# A check of sums for overflow takes a third of the time and says nothing, for `debug` is off.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
remember_types()
