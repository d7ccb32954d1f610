"""Steps of the embedded engine: a StepPlan in, one C++ call outside the GIL, a StepResult out."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.cache_layout import CacheLayout, cache_layout
from llmserve.engine.cpu.adapters import AdapterPacker, PackedAdapter
from llmserve.engine.cpu.layout import EngineHeader, read_header, read_ops
from llmserve.engine.cpu.op_codes import OpCode
from llmserve.engine.cpu.tactics import row_times, tactic_table, this_machine
from llmserve.engine.machine.cores import num_threads
from llmserve.engine.machine.memory import available_memory_bytes
from llmserve.engine.native.library import available_isas, chosen_isa, load_library
from llmserve.engine.native.masks import MaskMaker
from llmserve.engine.native.step import FlatStep, StepMemory
from llmserve.errors import InternalError, InvalidArgument, ResourceExhausted
from llmserve.scheduler.plan import StepPlan

__all__ = ["CpuRunner", "available_isas", "read_header"]


class CpuRunner:
    """An opened engine file with its KV pool and threads. One step at a time."""

    def __init__(
        self, handle: int, header: EngineHeader, *, num_blocks: int, threads: int, isa: str, path: Path,
        layout: CacheLayout, num_states: int = 0, handed_out: int = 0,
    ) -> None:  # fmt: skip
        self._handle = handle
        self._path = path
        self._handed_out = handed_out
        self._adapters: dict[int, PackedAdapter] = {}  # by slot: the library reads their memory
        self._library = load_library()
        self._close = weakref.finalize(self, self._library.close, handle)
        self._close.atexit = False  # a daemon thread may be inside a step; the system frees memory at exit
        self.header = header
        self.threads = threads
        self.isa = isa
        self.native_ns = 0  # spent in the library's steps so far; the rest of a step is Python's
        self._memory = StepMemory()
        self._masks = MaskMaker(self._library)
        self._info = RunnerInfo(
            vocab_size=header.vocab_size, block_size=header.block_size, num_blocks=num_blocks,
            max_num_tokens=header.max_num_tokens, max_batch_size=header.max_batch_size, max_seq_len=header.max_seq_len,
            weight_bytes=path.stat().st_size, block_bytes=layout.block_bytes, windowed_layers=layout.windowed_layers,
            num_states=num_states, state_bytes=header.state_bytes, output_width=header.output_width,
            needs_whole=header.needs_whole, hidden_width=header.hidden_width,
            draft_vocab_size=header.draft_vocab_size, row_times=row_times(path, this_machine(isa)),
        )  # fmt: skip

    @classmethod
    def open(
        cls, path: Path, *, num_blocks: int, threads: int = 0, isa: str = "", num_states: int | None = None,
        keeps_all: bool = True, handed_out: int = 0,
    ) -> CpuRunner:  # fmt: skip
        """Map the engine file `path` and allocate a pool of `num_blocks` KV blocks.

        num_states: slots for states of sequences, if the network has states; None: for the largest batch. keeps_all:
        layers with a window have no separate block tables (`layout_of`).

        handed_out: width of the hidden rows in each step's result; 0: none.

        threads: 0 uses every core that this process may use. isa: "" uses LLMSERVE_ISA or the fastest.
        Raises EngineFileError (corrupt or foreign file), ResourceExhausted (memory), Unsupported (ISA, library),
        InvalidArgument (an invalid number of blocks or threads).
        """
        if num_blocks < 1:
            raise InvalidArgument(f"num_blocks must be at least 1, got {num_blocks}")
        threads = num_threads(threads)
        header = read_header(path)
        if num_states is None or not header.state_bytes:
            num_states = header.max_batch_size if header.state_bytes else 0
        layout = layout_of(path, header, keeps_all=keeps_all)
        _check_memory(header, num_blocks * layout.block_bytes, num_blocks, num_states)
        isa = chosen_isa(isa)
        handle = load_library().open(
            path, isa=isa, num_blocks=num_blocks, threads=threads, num_states=num_states, places=layout.places
        )
        runner = cls(
            handle, header, num_blocks=num_blocks, threads=threads, isa=isa, path=path, layout=layout,
            num_states=num_states, handed_out=handed_out,
        )  # fmt: skip
        runner.set_tactics(tactic_table(path, this_machine(isa)))
        return runner

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def set_tactics(self, table: bytes) -> None:
        """Set the tactic of every operation and row bucket (`tactics.tactic_table`). Changes speed, never a result."""
        self._library.set_tactics(self._handle, table)

    def step(self, plan: StepPlan) -> StepResult:
        assert self._close.alive, "the runner is closed"
        assert 0 < len(plan.chunks) <= self._info.max_batch_size
        assert plan.num_tokens <= self._info.max_num_tokens
        flat = FlatStep(plan, self._info.num_choices, self._memory, self._info.output_width, self._handed_out)
        masking = self._masks.begin(flat)
        started = time.perf_counter_ns()
        try:
            self._library.step(self._handle, flat.record)
        except InvalidArgument as error:  # plans come from llmserve's scheduler, never from a client
            raise InternalError(f"the engine refused a step: {error}") from error
        finally:
            if masking is not None:
                masking.result()
        self.native_ns += time.perf_counter_ns() - started
        return flat.result()

    def read_block(self, block: int) -> bytes:
        """See `BlockRunner`."""
        return self._library.read_block(self._handle, block, self._info.block_bytes)

    def write_block(self, block: int, content: bytes) -> None:
        self._library.write_block(self._handle, block, content)

    def read_state(self, state: int) -> bytes:
        return self._library.read_state(self._handle, state, self._info.state_bytes)

    def write_state(self, state: int, content: bytes) -> None:
        self._library.write_state(self._handle, state, content)

    def packed(self, adapter: SealedAdapter) -> PackedAdapter:
        """See `AdapterRunner`."""
        return AdapterPacker(self._path).packed(adapter)

    def load_adapter(self, slot: int, packed: PackedAdapter) -> None:
        self._library.load_adapter(self._handle, slot, packed.records)
        self._adapters[slot] = packed

    def unload_adapter(self, slot: int) -> None:
        self._library.unload_adapter(self._handle, slot)
        del self._adapters[slot]

    def close(self) -> None:
        """Free the pool and join the threads. May be called again."""
        self._masks.close()
        self._close()


def layout_of(path: Path, header: EngineHeader, *, keeps_all: bool = False) -> CacheLayout:
    """`keeps_all`: do not release blocks because of windows."""
    reads = () if keeps_all or header.needs_whole else cache_reads(path)
    return cache_layout(reads, header.num_layers, header.kv_bytes_per_block, header.max_seq_len, header.block_size)


def cache_reads(path: Path) -> Iterator[tuple[int, int]]:
    """Layer and window (0: none) of each operation that reads a cache."""
    return ((op["layer"], op["window"]) for op in read_ops(path) if op["kind"] == OpCode.ATTENTION)


def _check_memory(header: EngineHeader, block_bytes: int, num_blocks: int, num_states: int) -> None:
    """Check the memory now; the kernel would only notice when pages are touched. `block_bytes`: of all blocks."""
    cache = block_bytes + num_states * header.state_bytes
    wanted, available = cache + header.activation_bytes, available_memory_bytes()
    if wanted > available:
        raise ResourceExhausted(
            f"the engine needs {wanted} bytes ({cache} for {num_blocks} KV blocks of {header.block_size} tokens"
            f"{f' and {num_states} states' if num_states else ''}, "
            f"{header.activation_bytes} for activations), but {available} bytes are available; "
            "lower the number of KV blocks, or build with a smaller max_num_tokens"
        )
