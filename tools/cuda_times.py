"""How long the CUDA target's kernels should take, from their machine code: a model, and where it is wrong.

A program starts, and goes through its longest loop, whose instructions say what each turn needs:

    chain   the cycles that its instructions wait for each other, and for what they load. Loads that a pipeline copies
            ahead are waited for once in as many turns as are under way
    issue   a slot of a scheduler for each instruction of each warp, of all programs that a multiprocessor holds
    matrix  what matrix instructions take

The longest of them counts. A launch takes as long as its programs, one set after the other, or as its bytes, and a gap
before the next. Six numbers were fitted to docs/benchmarks/cuda-h200.md, once for all formats and sizes, with the
kernels that were measured. Those of integers have changed since.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llmserve.builder.targets.cuda.compiler import WARP_THREADS, TritonCompiler
from llmserve.builder.targets.cuda.recorder import Recorder
from llmserve.engine.cuda.inputs import bucket_of
from llmserve.engine.cuda.layout import Kernel, Launch, StepPart
from tools.cuda_kernels import MAX_SEQ_LEN, REPORT, Row, lowered, rows

HEAD_ROWS = 64  # at a time
NETWORK, ARCHITECTURE, NUM_LAYERS = "Baichuan2-7B", "sm_90", 32
PRECISIONS = ("float16", "int8", "int4")
AS_MEASURED = "float16"  # its kernels have hardly changed since
MEASURED = REPORT.with_name("cuda-h200.md")  # the same network
CELL = re.compile(r"^\| (\d+) \| ([\d,]+) \|(?: \d+ \|)? (\d+) \| \d+ \| (\d+) \| (\d+) \|$", re.M)
PROMPT = re.compile(r"^\| (\w+) \| ([\d,]+) \| [\d.]+ \| ([\d.]+) \| \d+ \|$", re.M)

# Fitted, in cycles but the first two
GAP_US = 1.94  # between two launches of a graph
REACHED = 0.93  # of the copy rate
START = 1640.0  # until a program's first instruction, and from its last one
LOADED = 1150.0  # until what is loaded is there
COPIED = 2740.0  # the same, of copies into shared memory, all of which are under way
ISSUE = 2.3  # of a scheduler for an instruction

CACHED = 64.0  # bytes that a multiprocessor reads from the second cache in a cycle: assumed, not fitted
SCHEDULERS = 4  # of a multiprocessor
PRODUCTS_PER_CYCLE = 2048  # of floats of 16 bits, of a multiprocessor; of integers twice as many
STORED_BITS = {"float": 16.0, "int8": 8.5, "int4": 5.0}  # of a weight, its scales included
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
ENCODED = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")  # the upper half, on a line of its own
STALL_BIT, STALL_MASK = 41, 15  # in it: cycles until the next instruction of the warp
JUMP = re.compile(r"BRA.*?0x([0-9a-f]+)")
MATRIX = re.compile(r"([HI])GMMA\.64x(\d+)x(\d+)")  # by four warps together


class Gpu(NamedTuple):
    copied: float  # bytes/s, read and written
    multiplied: float  # FLOP/s in float16
    multiprocessors: int = 132
    clock: float = 1.755e9


H200 = Gpu(4.25e12, 760e12)
H100 = Gpu(2.97e12, 760e12)  # not measured: of its memory's 3.35 TB/s the part that an H200 reaches of its 4.8


class Step(NamedTuple):
    num_rows: int
    past: int  # tokens that each row attends to
    is_prompt: bool = False

    @property
    def full_rows(self) -> int:
        return bucket_of(self.num_rows, MAX_SEQ_LEN)

    def num_tiles(self, queries: int) -> int:
        return -(-self.num_rows // queries) if self.is_prompt else self.num_rows

    def __str__(self) -> str:
        return f"a prompt of {self.past:,}" if self.is_prompt else f"{self.num_rows} after {self.past:,}"


SHOWN = (Step(1, 32), Step(64, 32), Step(256, 32), Step(2048, 2048, is_prompt=True))


class Loop(NamedTuple):
    """The one with most products. For all threads of a program: `products`, and `matrix` cycles."""

    instructions: int
    stalls: int
    products: int
    matrix: float
    loads: int
    copies: int


class Code(NamedTuple):
    instructions: int
    stalls: int
    loop: Loop | None


def read_code(binary: bytes, threads: int) -> Code:
    """Of a kernel in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        listing = subprocess.run([str(tool), "-sass", file.name], capture_output=True, check=True, text=True).stdout
    lines: list[tuple[int, str, int]] = []  # place, text, stall
    for line in listing.splitlines():
        if (found := INSTRUCTION.search(line)) is not None:
            lines.append((int(found[1], 16), found[2], 0))
        elif (found := ENCODED.match(line)) is not None and lines:
            lines[-1] = (*lines[-1][:2], int(found[1], 16) >> STALL_BIT & STALL_MASK)
    jumps = [(int(found[1], 16), place) for place, text, _ in lines if (found := JUMP.search(text)) is not None]
    spans = [(to, place) for to, place in jumps if to < place]
    inner = [one for one in spans if not any(o != one and one[0] <= o[0] and o[1] <= one[1] for o in spans)]
    loops = [_loop([line for line in lines if first <= line[0] <= last], threads) for first, last in inner]
    longest = max(loops, key=lambda loop: loop.products, default=None)
    return Code(len(lines), sum(stall for *_, stall in lines), longest)


def _loop(lines: Sequence[tuple[int, str, int]], threads: int) -> Loop:
    texts = [text for _, text, _ in lines]
    products, matrix = 4 * threads * sum("IDP.4A" in text for text in texts), 0.0
    for found in filter(None, map(MATRIX.search, texts)):
        here = 64 * int(found[2]) * int(found[3]) * (threads // (4 * WARP_THREADS))
        products += here
        matrix += here / PRODUCTS_PER_CYCLE / (2 if found[1] == "I" else 1)
    loads, copies = (sum(name in text for text in texts) for name in ("LDG.", "LDGSTS"))
    return Loop(len(lines), sum(stall for *_, stall in lines), products, matrix, loads, copies)


class Work(NamedTuple):
    """Of a launch: its programs, the turns of each one's loop, what all read from memory and multiply, and the bytes of
    sums that each reads."""

    programs: int
    turns: int = 0
    num_bytes: float = 0.0
    products: float = 0.0
    summed: float = 0.0

    def best(self, gpu: Gpu) -> float:
        """Seconds that no launch can do without."""
        return max(self.num_bytes / gpu.copied, 2 * self.products / gpu.multiplied)


def work_of(launch: Launch, kernel: Kernel, code: Code, step: Step) -> Work:
    constants = dict(kernel.constants)

    def size(name: str) -> int:
        return int(constants[name])

    tiles = step.num_tiles(size("TILE_QUERIES") if "TILE_QUERIES" in constants else 1)
    grid = [extent.programs(step.full_rows, tiles) for extent in launch.grid]
    if "NUM_INPUTS" in constants:
        weights = size("NUM_INPUTS") * size("NUM_COLUMNS") * (2 if kernel.function == "linear.gated_linear" else 1)
        products = size("TILE_ROWS") * size("TILE_COLUMNS") * size("NUM_INPUTS") / grid[2]
        turns = math.ceil(products / code.loop.products) if code.loop and code.loop.products else 0
        num_bytes = weights * STORED_BITS[str(constants["FORMAT"])] / 8
        return Work(math.prod(grid), turns, num_bytes, weights * step.num_rows)
    if "TILE_KEYS" in constants:
        heads, segments = size("NUM_KV_HEADS"), 1 if step.is_prompt else -(-step.past // size("SEGMENT"))
        keys = step.past / 2 if step.is_prompt else min(step.past, size("SEGMENT"))  # on average
        kept = (1 if step.is_prompt else step.num_rows) * step.past * heads * size("HEAD_DIM")
        products = 2 * step.num_rows * heads * size("HEAD_DIM") * (keys if step.is_prompt else step.past)
        return Work(tiles * heads * segments, math.ceil(keys / size("TILE_KEYS")), 4.0 * kept, products)
    summed = 4.0 * size("SEGMENTS") * size("TILE_COLUMNS") if {"SEGMENTS", "TILE_COLUMNS"} <= constants.keys() else 0.0
    return Work(math.prod(grid), summed=summed)


class Launched(NamedTuple):
    """A launch of a step, as it should be."""

    kernel: Kernel
    work: Work
    seconds: float
    bound: str  # what it waits for


def launched(launch: Launch, row: Row, code: Code, step: Step, gpu: Gpu) -> Launched:
    work = work_of(launch, row.kernel, code, step)
    most = gpu.multiprocessors * row.programs
    sets = -(-work.programs // most)
    last = -(-(work.programs - (sets - 1) * most) // gpu.multiprocessors)
    times = [_cycles(work, code, row, count) for count in (*[row.programs] * (sets - 1), last)]
    found = {
        "bytes": work.num_bytes / (REACHED * gpu.copied),
        times[0][1]: sum(cycles for cycles, _ in times) / gpu.clock,
    }
    bound = max(found, key=found.__getitem__)
    return Launched(row.kernel, work, GAP_US * 1e-6 + found[bound], bound)


def _cycles(work: Work, code: Code, row: Row, together: int) -> tuple[float, str]:
    """Of so many programs on one multiprocessor, from the first start to the last end; and what they wait for."""
    slots = together * row.compiled.threads / WARP_THREADS / SCHEDULERS * ISSUE
    loop = code.loop if work.turns else None
    if loop is None:
        return START + max(code.stalls + LOADED, code.instructions * slots) + together * work.summed / CACHED, "start"
    is_ahead = loop.copies > 0 and loop.loads == 0
    chain = max(loop.stalls, COPIED / max(1, row.kernel.num_stages - 1)) if is_ahead else loop.stalls + LOADED
    turn = {"chain": chain, "issue": loop.instructions * slots, "matrix": loop.matrix * together}
    longest = max(turn, key=turn.__getitem__)
    return START + code.stalls - loop.stalls + work.turns * turn[longest], longest


class Network:
    """Layers, and the head, in one precision."""

    def __init__(self, precision: str, steps: Sequence[Step]) -> None:
        """`steps`: that it is asked for."""
        self._records = [lowered(NETWORK, precision, num_hidden_layers=count) for count in (1, 2)]
        asked = *steps, Step(1, 1), Step(HEAD_ROWS, 1)
        wanted = {kernel for step in asked for record in self._records for _, kernel in _launches(record, step)}
        named = dict.fromkeys(sorted(wanted, key=repr), (NETWORK, precision))
        self._rows = {row.kernel: row for row in rows(named, [ARCHITECTURE], TritonCompiler())}
        self._codes = {
            kernel: read_code(row.compiled.binary, row.compiled.threads) for kernel, row in self._rows.items()
        }

    def launches(self, step: Step, gpu: Gpu, part: StepPart = StepPart.BODY, num_layers: int = 1) -> Iterator[Launched]:
        """Of the head, or of the body with one layer or two."""
        for launch, kernel in _launches(self._records[num_layers - 1], step, part):
            yield launched(launch, self._rows[kernel], self._codes[kernel], step, gpu)

    def code_of(self, kernel: Kernel) -> Code:
        return self._codes[kernel]

    def layer_us(self, step: Step, gpu: Gpu) -> float:
        """What a second layer adds: the first norm and the last sum of a network have launches of their own."""
        one, two = (sum(each.seconds for each in self.launches(step, gpu, num_layers=count)) for count in (1, 2))
        return 1e6 * (two - one)

    def fraction(self, step: Step, gpu: Gpu) -> float:
        """Of the nearer limit, for all layers and the head."""
        layer, head_rows = [*self.launches(step, gpu)], 1 if step.is_prompt else step.num_rows
        head = [*self.launches(step._replace(num_rows=min(head_rows, HEAD_ROWS)), gpu, StepPart.HEAD)]
        steps = [*layer * NUM_LAYERS, *head * -(-head_rows // HEAD_ROWS)]
        work = [each.work for each in steps]
        num_bytes, products = sum(each.num_bytes for each in work), sum(each.products for each in work)
        saved = (NUM_LAYERS - 1) * (sum(each.seconds for each in layer) - 1e-6 * self.layer_us(step, gpu))
        return Work(0, 0, num_bytes, products).best(gpu) / (sum(each.seconds for each in steps) - saved)


def _launches(record: Recorder, step: Step, *parts: StepPart) -> Iterator[tuple[Launch, Kernel]]:
    """Of these parts, or of all."""
    names = [part.value for part in parts or (StepPart.BODY, StepPart.HEAD)]
    for launch in record.launches:
        kernel = record.kernels[launch.kernel]
        is_asked = launch.part in names and kernel.function != "rowwise.embed"
        if is_asked and launch.least_rows <= step.full_rows <= launch.most_rows:
            yield launch, kernel


def measured(page: str) -> Mapping[Step, Mapping[str, float]]:
    """Microseconds of a layer, by precision."""
    found: dict[Step, dict[str, float]] = {}
    for cell in CELL.findall(page):
        times = [float(time) for time in cell[2:]]
        found[Step(int(cell[0]), int(cell[1].replace(",", "")))] = dict(zip(PRECISIONS, times, strict=True))
    for precision, tokens, milliseconds in PROMPT.findall(page):
        count = int(tokens.replace(",", ""))
        found.setdefault(Step(count, count, is_prompt=True), {})[precision] = 1000 * float(milliseconds)
    return found


def compared(networks: Mapping[str, Network], cells: Mapping[Step, Mapping[str, float]]) -> str:
    """A layer's time beside the measured one."""
    lines = [
        f"| step | {' | '.join(f'{each} | measured | ratio' for each in networks)} |",
        "|" + "---|" * (1 + 3 * len(networks)),
    ]
    ratios = []
    for step, times in cells.items():
        cell = f"| {step} |"
        for precision, network in networks.items():
            ours, theirs = network.layer_us(step, H200), times.get(precision)
            ratios += [math.log(ours / theirs)] if theirs and precision == AS_MEASURED else []
            cell += f" {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |" if theirs else f" {ours:.0f} | | |"
        lines.append(cell)
    error = math.sqrt(sum(ratio * ratio for ratio in ratios) / len(ratios))
    worst = math.exp(max(map(abs, ratios)))
    found = f"{len(ratios)} cells of {AS_MEASURED}: mean error {math.exp(error) - 1:.0%}, worst {worst - 1:.0%}."
    return "\n".join([*lines, "", found])


def products(networks: Mapping[str, Network], steps: Sequence[Step]) -> str:
    """Of each product: its time, the part of the nearer limit that it reaches, and what it waits for."""
    lines = [f"| format, product | {' | '.join(map(str, steps))} |", "|" + "---|" * (1 + len(steps))]
    for precision, network in networks.items():
        columns = [[each for each in network.launches(step, H200) if each.work.products] for step in steps]
        others = [[each for each in network.launches(step, H100) if each.work.products] for step in steps]
        for place in range(max(map(len, columns))):
            cells = []
            for found, elsewhere in zip(columns, others, strict=True):
                one, other = found[place], elsewhere[place]
                parts = (one.work.best(H200) / one.seconds, other.work.best(H100) / other.seconds)
                cells.append(f"{1e6 * one.seconds:.0f} us, {parts[0]:.2f} ({parts[1]:.2f}), {one.bound}")
            lines.append(f"| {precision}, {_name(columns[0][place].kernel)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _name(kernel: Kernel) -> str:
    constants = dict(kernel.constants)
    if "NUM_INPUTS" not in constants:
        return "attention"
    return f"{constants['FORMAT']} {constants['NUM_INPUTS']} to {constants['NUM_COLUMNS']}"


def fractions(networks: Mapping[str, Network], steps: Sequence[Step]) -> str:
    lines = [f"| step | {' | '.join(networks)} |", "|" + "---|" * (1 + len(networks))]
    for step in steps:
        parts = [[network.fraction(step, gpu) for gpu in (H200, H100)] for network in networks.values()]
        lines.append(f"| {step} | {' | '.join(f'{ours:.2f} ({theirs:.2f})' for ours, theirs in parts)} |")
    return "\n".join(lines)


def page(networks: Mapping[str, Network], cells: Mapping[Step, Mapping[str, float]], compiler: str) -> str:
    return f"""# How long CUDA kernels should take

`make cuda-kernels` makes this page without a GPU. It is a model of {NETWORK}, from the machine code of its kernels
for {ARCHITECTURE} ({compiler}): instructions, stall cycles, loads in flight, matrix instructions, and
programs that fit on a multiprocessor. `tools/cuda_times.py` defines the rules.

Assumptions:

* Six numbers are fitted to [the measurements on an H200](cuda-h200.md), once for all formats and steps: {GAP_US} us
  between two launches, {REACHED:.0%} of the copy rate, {START:.0f} cycles for a program's start and end, {LOADED:.0f}
  cycles for a load, {COPIED:.0f} for a copy into shared memory, and {ISSUE} scheduler cycles for an instruction.
* An H200 copies {H200.copied / 1e12} TB/s and multiplies {H200.multiplied / 1e12:.0f} TFLOP/s, as measured. An H100 has
  the same multiprocessors, and copies {H100.copied / 1e12} TB/s, the same fraction of its memory's peak. None was
  measured.
* Weights are read from memory, everything else from caches. A multiprocessor reads {CACHED:.0f} bytes of sums per
  cycle.

## A layer, compared with the time that an earlier version took on an H200 (us)

{compared(networks, cells)}

The products of int8 and int4 have changed since then: they have about two thirds of the instructions, and from five
rows on they use matrix instructions. Their ratios are what this should gain, and nothing has confirmed it on a GPU.
With the kernels that were measured, the mean error of all 44 cells was 12%, and the worst 46%. The kernels of float16
have changed slightly: launches were merged, long sums of many rows have smaller tiles, those of 129 to 256 rows are
divided among more programs, and prompts were measured with early launches.

## Fraction of the nearer limit: {NUM_LAYERS} layers and head, H200 (H100)

The limit is the copy rate for bytes, or the product rate of float16. "1 after 32": one sequence with 32 cached tokens.

{fractions(networks, SHOWN)}

## Products of a layer: time on an H200, fraction of the nearer limit (H100), and what limits it

`chain`: its own instructions and loads; `issue`: scheduler slots; `matrix`: matrix instructions; `start`: programs
are short.

{products(networks, SHOWN)}
"""


def main() -> None:
    cells = measured(MEASURED.read_text())
    networks = {precision: Network(precision, [*cells, *SHOWN]) for precision in PRECISIONS}
    text = page(networks, cells, TritonCompiler().version)
    REPORT.with_name("cuda-times.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
