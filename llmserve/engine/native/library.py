"""libllmserve_cpu.so through ctypes: its functions with types, and the errors for its status codes."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from llmserve.engine.native.records import AdapterPartRecord, StepRecord
from llmserve.errors import (
    EngineFileError,
    InternalError,
    InvalidArgument,
    LlmserveError,
    ResourceExhausted,
    Unsupported,
)

ABI_VERSION = 15
LIBRARY_NAME = "libllmserve_cpu.so"
ISA_VARIABLE = "LLMSERVE_ISA"
TEXT_BYTES = 1024
ERRORS: dict[int, type[LlmserveError]] = {
    1: InvalidArgument,
    2: EngineFileError,
    3: ResourceExhausted,
    4: InternalError,
}

ELF_HEAD = struct.Struct("<4s14xH")  # magic, machine
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}


class Library:
    """The C API. Failing calls raise llmserve's errors; handles are plain integers."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            reason = _foreign_machine(path) or str(error)
            raise Unsupported(
                f"the CPU engine's library cannot be loaded ({reason}); build it: pip install --no-build-isolation -e ."
            ) from error
        self._declare("llmserve_abi_version", ctypes.c_uint32)
        if (version := self._library.llmserve_abi_version()) != ABI_VERSION:
            raise Unsupported(
                f"{path} has interface version {version}, but this code requires {ABI_VERSION}; rebuild it: "
                "pip install --no-build-isolation -e ."
            )
        self._declare("llmserve_variants", None, ctypes.c_char_p, ctypes.c_size_t)
        self._declare(
            "llmserve_open", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32,
            ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int), ctypes.c_char_p,
            ctypes.c_size_t,
        )  # fmt: skip
        self._declare("llmserve_close", None, ctypes.c_void_p)
        self._declare(
            "llmserve_step", ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(StepRecord), ctypes.c_char_p, ctypes.c_size_t
        )
        content = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t)
        for name in ("read_block", "write_block", "read_state", "write_state"):
            self._declare(f"llmserve_{name}", ctypes.c_int, *content, ctypes.c_char_p, ctypes.c_size_t)
        slot = (ctypes.c_void_p, ctypes.c_uint32)
        self._declare(
            "llmserve_load_adapter", ctypes.c_int, *slot, ctypes.POINTER(AdapterPartRecord), ctypes.c_size_t,
            ctypes.c_char_p, ctypes.c_size_t,
        )  # fmt: skip
        self._declare("llmserve_unload_adapter", ctypes.c_int, *slot, ctypes.c_char_p, ctypes.c_size_t)
        self._declare("llmserve_signal", None, ctypes.c_void_p)
        self._declare(
            "llmserve_open_choosers", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32,
            ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_size_t,
        )  # fmt: skip
        self._declare("llmserve_close_choosers", None, ctypes.c_void_p)
        self._declare(
            "llmserve_choose", ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(StepRecord), ctypes.c_void_p,
            ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t,
        )  # fmt: skip
        trial = (ctypes.c_uint32,) * 5
        texts = (ctypes.c_char_p, ctypes.c_size_t)
        self._declare("llmserve_tactics", ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, *texts)
        self._declare(
            "llmserve_time_tactics", ctypes.c_int, ctypes.c_char_p, *trial, ctypes.POINTER(ctypes.c_double), *texts
        )
        self._declare("llmserve_set_tactics", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, *texts)
        measured = (ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint32)
        self._declare("llmserve_measure", ctypes.c_int, *measured, ctypes.POINTER(ctypes.c_double), *texts)

    def _declare(self, name: str, result: Any, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments

    def variants(self) -> list[str]:
        """Kernel variants for this machine, slowest first."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        self._library.llmserve_variants(text, TEXT_BYTES)
        return text.value.decode().split(",")

    def open(
        self, path: Path, *, isa: str, num_blocks: int, threads: int, num_states: int = 0,
        places: Sequence[tuple[int, int]] = (),
    ) -> int:  # fmt: skip
        """`places`: table and part of each layer; None: all share one table, and each has its own part."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        status = ctypes.c_int()
        handle: int | None = self._library.llmserve_open(
            os.fsencode(path), isa.encode(), num_blocks, num_states, threads,
            array("I", chain.from_iterable(places)).tobytes(), len(places), ctypes.byref(status), text, TEXT_BYTES,
        )  # fmt: skip
        if handle is None:
            raise ERRORS[status.value](f"{path}: {text.value.decode(errors='replace')}")
        return handle

    def close(self, handle: int) -> None:
        self._library.llmserve_close(handle)

    def step(self, handle: int, record: StepRecord) -> None:
        self._call(self._library.llmserve_step, handle, ctypes.byref(record))

    def read_block(self, handle: int, block: int, num_bytes: int) -> bytes:
        """See `llmserve_read_block`."""
        data = ctypes.create_string_buffer(num_bytes)
        self._call(self._library.llmserve_read_block, handle, block, data, num_bytes)
        return data.raw

    def write_block(self, handle: int, block: int, data: bytes) -> None:
        """See `llmserve_write_block`."""
        self._call(self._library.llmserve_write_block, handle, block, data, len(data))

    def read_state(self, handle: int, state: int, num_bytes: int) -> bytes:
        """See `llmserve_read_state`."""
        data = ctypes.create_string_buffer(num_bytes)
        self._call(self._library.llmserve_read_state, handle, state, data, num_bytes)
        return data.raw

    def write_state(self, handle: int, state: int, data: bytes) -> None:
        """See `llmserve_write_state`."""
        self._call(self._library.llmserve_write_state, handle, state, data, len(data))

    def load_adapter(self, handle: int, slot: int, parts: ctypes.Array[AdapterPartRecord]) -> None:
        """See `llmserve_load_adapter`."""
        self._call(self._library.llmserve_load_adapter, handle, slot, parts, len(parts))

    def unload_adapter(self, handle: int, slot: int) -> None:
        self._call(self._library.llmserve_unload_adapter, handle, slot)

    def signal(self, flag: int) -> None:
        """See `llmserve_signal`; `flag`: its address."""
        self._library.llmserve_signal(flag)

    def open_choosers(self, isa: str, vocab_size: int, threads: int) -> int:
        """See `llmserve_open_choosers`."""
        text, status = ctypes.create_string_buffer(TEXT_BYTES), ctypes.c_int()
        handle: int | None = self._library.llmserve_open_choosers(
            isa.encode(), vocab_size, threads, ctypes.byref(status), text, TEXT_BYTES
        )
        if handle is None:
            raise ERRORS[status.value](text.value.decode(errors="replace"))
        return handle

    def close_choosers(self, handle: int) -> None:
        self._library.llmserve_close_choosers(handle)

    def choose(self, handle: int, record: StepRecord, logits: int, begin: int, num_rows: int) -> None:
        """See `llmserve_choose`; `logits`: their address."""
        self._call(self._library.llmserve_choose, handle, ctypes.byref(record), logits, begin, num_rows)

    def set_tactics(self, handle: int, tactics: bytes) -> None:
        """One per operation and row bucket, in order."""
        self._call(self._library.llmserve_set_tactics, handle, tactics, len(tactics))

    def tactics(self, isa: str, weight_type: int, rows: int) -> tuple[list[str], int]:
        """Names of the tactics for a type of weights and a number of rows, and the index of the default one."""
        names, _, default = self._call(self._library.llmserve_tactics, isa.encode(), weight_type, rows).partition(";")
        return names.split(","), int(default)

    def time_tactics(self, isa: str, weight_type: int, shape: tuple[int, int], rows: int, count: int) -> list[float]:
        """Seconds that one thread needs with each of `count` tactics. shape: inputs, outputs."""
        seconds = (ctypes.c_double * count)()
        self._call(self._library.llmserve_time_tactics, isa.encode(), weight_type, *shape, rows, count, seconds)
        return list(seconds)

    def measure(self, limit: int, isa: str, *, threads: int, amount: int, num_passes: int) -> list[float]:
        """See `llmserve_measure`; returns the rate per second of each pass."""
        rates = (ctypes.c_double * num_passes)()
        self._call(self._library.llmserve_measure, limit, isa.encode(), threads, amount, num_passes, rates)
        return list(rates)

    def _call(self, function: Any, *arguments: Any) -> str:
        """The text that the call returns; raises its error if it fails."""
        text = ctypes.create_string_buffer(TEXT_BYTES)
        if status := function(*arguments, text, TEXT_BYTES):
            raise ERRORS[status](text.value.decode(errors="replace"))
        return text.value.decode()


def _foreign_machine(path: Path) -> str:
    """The machine that a foreign library is for; the loader itself would only say that the file does not exist."""
    try:
        head = path.read_bytes()[: ELF_HEAD.size]
        magic, machine = ELF_HEAD.unpack(head)
    except (OSError, struct.error):
        return ""
    built_for = ELF_MACHINES.get(machine, "another processor")
    if magic != b"\x7fELF" or built_for == platform.machine():
        return ""
    return f"{path} was built for {built_for}, but this machine is {platform.machine()}"


@functools.cache
def load_library() -> Library:
    """The library next to this module, loaded once. If missing, `Unsupported` has the command that builds it."""
    return Library(Path(__file__).with_name(LIBRARY_NAME))


def available_isas() -> list[str]:
    """Kernel variants of this machine, slowest first: "portable", then of "avx2", "avx2_vnni", "avx512" and "neon"
    those that it has."""
    return load_library().variants()


def chosen_isa(wanted: str = "") -> str:
    """`wanted`, else LLMSERVE_ISA, else the fastest. `Unsupported` if this machine does not have it."""
    isa = wanted or os.environ.get(ISA_VARIABLE, "")
    isas = available_isas()
    if isa and isa not in isas:
        raise Unsupported(f"this machine has no {isa!r} kernels; it has {', '.join(isas)}")
    return isa or isas[-1]
