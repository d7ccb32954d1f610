"""Steps of a CUDA engine: a StepPlan in, a copy to the device, graphs, tokens back, a StepResult out.

A step is padded to a bucket of rows, and each bucket has a graph, captured when the engine is opened. The graph of the
body runs over all tokens, that of the head over pieces of the rows whose logits are needed. If a request only needs a
token, the device chooses it, and the next step can read it there before the host has seen it. For everything else, the
host uses the CPU engine's library. Both choose the same token from equal logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.base import RunnerInfo, StepResult
from llmserve.engine.cache_layout import CacheLayout
from llmserve.engine.cuda.choices import NOBODY, StepChoice, choice_offsets, step_choice
from llmserve.engine.cuda.device import Device, Function, Graph
from llmserve.engine.cuda.inputs import FIRST_UNSEEN, Inputs, bucket_of, buckets, max_tiles
from llmserve.engine.cuda.layout import TILE_ROWS, Address, EngineHeader, Launch, Room, StepPart, read_header
from llmserve.engine.cuda.pinned import Pinned
from llmserve.engine.cuda.tactics import chosen, machine_of
from llmserve.engine.directory.artifact import CACHE_FILE
from llmserve.engine.native.choosers import Choice, Choosers
from llmserve.engine.tactics import TacticCache
from llmserve.errors import EngineFileError, InvalidArgument, Unsupported
from llmserve.scheduler.plan import StepPlan

STAGING_BYTES = 64 << 20  # of weights while they are copied to the device


class CudaRunner:
    """An opened engine file on one device, with its KV pool. Owns the device. One step at a time."""

    def __init__(
        self, path: Path, device: Device, *, num_blocks: int, threads: int = 0, num_states: int | None = None,
        keeps_all: bool = True,
    ) -> None:  # fmt: skip
        """`num_blocks`: of the KV pool; `threads`: threads that choose tokens, 0: one per core; `num_states`: slots for
        states of sequences, if the network has states, None: for the largest batch; `keeps_all`: layers with a window
        have no separate block tables.

        Raises Unsupported (an engine without kernels for the device), EngineFileError, ResourceExhausted.
        """
        if num_blocks < 1:
            raise InvalidArgument(f"num_blocks must be at least 1, got {num_blocks}")
        self.header = header = read_header(path)
        check_architecture(header, device)
        self.device = device
        self._num_blocks = num_blocks
        num_states = header.max_batch_size if num_states is None else num_states
        self._num_states = num_states if header.state_bytes else 0
        self._layout = layout = header.cache_layout(keeps_all=keeps_all)
        self._inputs = Inputs(header, layout.windowed_layers, num_blocks)
        self._choice_offsets, self._choice_bytes = choice_offsets(header)
        self._most_rows = dict.fromkeys(StepPart, header.head_rows) | {StepPart.BODY: header.max_num_tokens}
        self._unseen: Mapping[int, int] = {}  # sequence -> what stands for the token that the last step chooses for it
        self._close = ExitStack()
        self._close.callback(device.close)
        try:
            self._choosers = Choosers(header.vocab_size, threads)
            self._close.callback(self._choosers.close)
            self._allocate()
            self._copy_weights(path)
            self._functions = self._load(path)
            cache = TacticCache.load(path.with_name(CACHE_FILE), machine_of(device))
            self._graphs = {
                (part, rows): self.capture(self._launches(part, rows, cache), rows)
                for part, most in self._most_rows.items()
                for rows in buckets(most)
            }
            device.synchronize()
        except BaseException:
            self.close()
            raise
        self._info = RunnerInfo(
            vocab_size=header.vocab_size, block_size=header.block_size, num_blocks=num_blocks,
            max_num_tokens=header.max_num_tokens, max_batch_size=header.max_batch_size, max_seq_len=header.max_seq_len,
            block_bytes=layout.block_bytes, windowed_layers=layout.windowed_layers,
            num_states=self._num_states, state_bytes=header.state_bytes,
            gpu_bytes=fixed_bytes(header, layout) + layout.block_bytes * num_blocks
            + header.state_bytes * self._num_states,
            pinned_bytes=sum(host.num_bytes for host in self._free) + self._logits.nbytes,
        )  # fmt: skip

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def step(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> CudaStep:
        """See `PipelinedRunner`. At most one step may be pending."""
        assert 0 < len(plan.chunks) <= self._info.max_batch_size
        assert plan.num_tokens <= self._info.max_num_tokens
        host = self._free.pop(0)
        num_rows = bucket_of(plan.num_tokens, self.header.max_num_tokens)
        for used in self._inputs.fill(host.views, plan.chunks, num_rows, self._unseen):
            self.device.write(self._places[Room.INPUT] + used.start, host.staged[used])
        self.device.run(self._graphs[StepPart.BODY, num_rows])
        choice = self._choosers.begin(plan)
        step = step_choice(choice.flat, self.header)
        host.send_requests(step, choice.flat, self._places[Room.CHOICE])
        for begin in range(0, len(step.rows), self.header.head_rows):
            self._run_head(host, choice, step, begin)
        if len(step.chosen):
            tokens = self._places[Room.CHOICE] + self._choice_offsets["tokens"]
            self.device.read(host.tokens[: len(step.records)].view(np.uint8), tokens)
        self.device.record(host.event)
        sampled = (chunk.sequence_id for chunk in plan.chunks for _ in range(chunk.num_samples))
        found = choice.flat.tokens
        self._unseen = {  # the last one of a chunk's samples
            sequence_id: FIRST_UNSEEN - place if is_ours else found[place]
            for place, (sequence_id, is_ours) in enumerate(zip(sampled, step.is_chosen, strict=True))
        }
        return CudaStep(self.device, host, self._free, choice, step.chosen)

    def replay(self, num_sequences: int, count: int, *, with_head: bool = True) -> None:
        """Run the device work of a step of so many decoding sequences `count` times, and wait; for measurements.

        No step may be pending; positions and tokens are the last step's. `with_head`: logits and choice too.
        """
        body = self._graphs[StepPart.BODY, bucket_of(num_sequences, self.header.max_num_tokens)]
        head_rows = self.header.head_rows
        begins = range(0, num_sequences if with_head else 0, head_rows)
        pieces = [min(head_rows, num_sequences - begin) for begin in begins]
        for _ in range(count):
            self.device.run(body)
            for rows in pieces:
                for part in (StepPart.HEAD, StepPart.BEST):
                    self.device.run(self._graphs[part, bucket_of(rows, head_rows)])
        self.device.synchronize()

    def _run_head(self, host: Pinned, choice: Choice, step: StepChoice, begin: int) -> None:
        """Logits of the selected rows from `begin` on, as many as fit, and the tokens chosen from them."""
        head_rows = self.header.head_rows
        rows = step.rows[begin : begin + head_rows]
        num_rows = bucket_of(len(rows), head_rows)
        host.send_rows(step, choice.selected, begin, begin + head_rows, self._places[Room.CHOICE])
        self.device.run(self._graphs[StepPart.HEAD, num_rows])
        is_ours = rows == NOBODY
        if not is_ours.all():
            wanted = {StepPart.EDITS: step.has_edits, StepPart.BEST: True, StepPart.DRAWS: step.has_draws}
            for part in (part for part, is_wanted in wanted.items() if is_wanted):
                self.device.run(self._graphs[part, num_rows])
        if is_ours.any():
            self._choose_here(choice, np.flatnonzero(is_ours), begin)

    def _choose_here(self, choice: Choice, rows: NDArray[np.intp], begin: int) -> None:
        """Choose with the library, in these rows of the piece that begins at `begin`."""
        first, last = int(rows[0]), int(rows[-1])
        logits = self._logits[first : last + 1]
        self.device.read(logits.reshape(-1).view(np.uint8), self._places[Room.LOGITS] + logits[0].nbytes * first)
        self.device.synchronize()
        for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            choice.add(logits[run[0] - first : run[-1] + 1 - first], begin + int(run[0]))

    def close(self) -> None:
        """Release the device. May be called again."""
        self._close.close()

    def _allocate(self) -> None:
        header, device = self.header, self.device
        parts, num_blocks = header.plane_bytes[: self._layout.num_parts], self._num_blocks + self._layout.num_spare
        self._planes: dict[Room, list[int]] = {  # the start of each part's arrays, and the end of the last
            room: [begin * num_blocks for begin in accumulate(num_bytes, initial=0)]
            for room, num_bytes in zip((Room.KEYS, Room.VALUES), zip(*parts, strict=True), strict=True)
        }
        wanted = {
            Room.TENSOR: header.weight_bytes,
            **{room: begins[-1] for room, begins in self._planes.items()},
            Room.INPUT: self._inputs.num_bytes,
            Room.SCRATCH: header.scratch_bytes,
            Room.LOGITS: _logits_bytes(header),
            Room.CHOICE: self._choice_bytes,
        }
        if self._num_states:
            wanted[Room.STATES] = header.state_bytes * self._num_states
        self._places = {room: device.allocate(max(num_bytes, 1)) for room, num_bytes in wanted.items()}
        rows = _in_tiles(header.max_num_tokens)
        self._buffers = [device.allocate(num_bytes * rows) for num_bytes in header.buffers]
        for room in (Room.KEYS, Room.VALUES):  # unused positions are multiplied by 0
            device.clear(self._places[room], wanted[room])
        device.clear(self._places[Room.CHOICE], self._choice_bytes)  # counts start at zero
        device.clear(self._places[Room.INPUT], self._inputs.num_bytes)  # for a replay before any step
        self._free = [Pinned(device, header, self._inputs) for _ in range(2)]  # one for each running step
        host_logits = device.host_memory(4 * header.vocab_size * header.head_rows)
        self._logits: NDArray[np.float32] = host_logits.view(np.float32).reshape(header.head_rows, header.vocab_size)
        self._tensors = {tensor.name: tensor.offset - header.tensors_begin for tensor in header.tensors}

    def _copy_weights(self, path: Path) -> None:
        header, address = self.header, self._places[Room.TENSOR]
        staging = np.empty(min(STAGING_BYTES, max(header.weight_bytes, 1)), np.uint8)  # pinned memory would stay
        with path.open("rb") as file:
            file.seek(header.data_begin + header.tensors_begin)
            for begin in range(0, header.weight_bytes, STAGING_BYTES):
                piece = staging[: min(STAGING_BYTES, header.weight_bytes - begin)]
                if file.readinto(piece.data) != len(piece):
                    raise EngineFileError(f"{path} was truncated while it was read; rebuild the engine")
                self.device.write(address + begin, piece)
                self.device.synchronize()

    def _load(self, path: Path) -> list[Function]:
        """The functions of all kernels."""
        functions = []
        with path.open("rb") as file:
            for binary in self.header.binaries[self.device.architecture]:
                file.seek(self.header.data_begin + binary.offset)
                content = file.read(binary.num_bytes)
                limits = {"shared_bytes": binary.shared_bytes, "num_arguments": binary.num_arguments}
                functions.append(self.device.load(content, binary.symbol, **limits))
        return functions

    def _launches(self, part: StepPart, num_rows: int, cache: TacticCache) -> Iterator[Launch]:
        for launch in self.header.launches:
            if launch.part == part.value and launch.least_rows <= num_rows <= launch.most_rows:
                yield chosen(self.header, launch, num_rows, cache)

    def capture(self, launches: Iterable[Launch], num_rows: int) -> Graph:
        """A graph of these launches, for so many rows."""
        with self.device.capture() as graph:
            for launch in launches:
                self._launch(launch, num_rows)
        return graph

    def _launch(self, launch: Launch, num_rows: int) -> None:
        binary = self.header.binaries[self.device.architecture][launch.kernel]
        num_tiles = max_tiles(self.header, num_rows)
        x, y, z = (extent.programs(num_rows, num_tiles) for extent in launch.grid)
        layers = (int(argument.name) for argument in launch.arguments if argument.room == Room.KEYS.value)
        table = next((self._layout.place(layer)[0] for layer in layers), 0)
        arguments = [self.place(argument, table) for argument in launch.arguments]
        arguments += [0] * (binary.num_arguments - len(arguments))
        self.device.launch(self._functions[launch.kernel], (x, y, z), binary.threads, binary.shared_bytes, arguments)

    def place(self, argument: Address, table: int = 0) -> int:
        """An argument's address on the device. `table`: whose slots and block tables are used."""
        room = Room(argument.room)
        if room is Room.BUFFER:
            return self._buffers[int(argument.name)] + argument.offset
        begin = {
            Room.TENSOR: lambda: self._tensors[argument.name],
            Room.INPUT: lambda: self._inputs.offset(argument.name, table),
            Room.CHOICE: lambda: self._choice_offsets[argument.name],
            **dict.fromkeys(self._planes, lambda: self._planes[room][self._layout.place(int(argument.name))[1]]),
        }.get(room, lambda: 0)()
        return self._places[room] + begin + argument.offset


class CudaStep(NamedTuple):
    """A running step; see `PendingStep`."""

    device: Device
    host: Pinned
    free: list[Pinned]  # takes `host` back
    choice: Choice
    chosen: NDArray[np.int32]  # samples whose tokens the device chooses

    def result(self) -> StepResult:
        self.device.wait(self.host.event)
        self.choice.flat.put_tokens(self.chosen, self.host.tokens[self.chosen])
        self.free.append(self.host)
        return self.choice.result()


def check_architecture(header: EngineHeader, device: Device) -> None:
    """`Unsupported` unless the engine has kernels for the device."""
    if device.architecture not in header.binaries:
        built_for = ", ".join(header.binaries)
        raise Unsupported(
            f"the engine was built for {built_for}, but this GPU is {device.architecture} ({device.name}); build it "
            f"again with --gpu {','.join((*header.binaries, device.architecture))}"
        )


def fixed_bytes(header: EngineHeader, layout: CacheLayout) -> int:
    """Device memory, without the KV pool."""
    inputs = Inputs(header, layout.windowed_layers).num_bytes
    steps = inputs + choice_offsets(header)[1] + _logits_bytes(header) + layout.num_spare * layout.block_bytes
    return header.weight_bytes + steps + header.scratch_bytes + sum(header.buffers) * _in_tiles(header.max_num_tokens)


def _logits_bytes(header: EngineHeader) -> int:
    return 4 * header.vocab_size * _in_tiles(header.head_rows)


def _in_tiles(num_rows: int) -> int:
    return -(-num_rows // TILE_ROWS) * TILE_ROWS
