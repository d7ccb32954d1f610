"""Options of both benchmark commands, and their common start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.engine.cpu.limits import Limit, measure_limit
from llmserve.engine.machine.cores import usable_cores
from llmserve.engine.machine.description import machine_name
from llmserve.engine.native.library import chosen_isa
from tools.benchmark.cells import CELLS, LONG_CELLS
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import Contestant
from tools.benchmark.job import Job
from tools.benchmark.process import ROOT
from tools.benchmark.shapes import SHAPES

ALL_SHAPES = ("0.4b", "1.1b")


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool
    shapes: tuple[str, ...]
    rounds: int
    minutes: float
    threads: int
    folder: Path
    output: Path
    only: tuple[str, ...]
    cells: tuple[str, ...]

    def chosen(self, contestants: Sequence[Contestant]) -> list[Contestant]:
        """Contestants that `--only` names, or all."""
        return [one for one in contestants if not self.only or any(text in str(one) for text in self.only)]

    def job(self) -> Job:
        """The common part of all jobs; module, precision and network are filled in later."""
        seconds, passes = (2.0, 1) if self.quick else (4.0, 2)
        cells = CELLS if self.quick else (*CELLS, *LONG_CELLS)
        cells = tuple(cell for cell in cells if not self.cells or any(text in cell.name for text in self.cells))
        return Job("", "", "", self.folder, self.threads, cells, passes=passes, max_seconds=seconds)

    def make_checkpoints(self) -> None:
        for name in self.shapes:
            make_checkpoint(self.folder / f"checkpoint-{name}", SHAPES[name])

    def machine(self) -> str:
        """A description of the machine."""
        return f"{machine_name()}; {self.threads} threads; kernels for {chosen_isa()}"

    def host_class(self) -> str:
        """The machine's class, for file names."""
        return f"{self.threads}x-{chosen_isa()}"

    def limits(self) -> dict[str, float]:
        return {
            "read_bytes": measure_limit(Limit.READ, threads=self.threads),
            "products": measure_limit(Limit.MULTIPLY, threads=self.threads),
            "products_int8": measure_limit(Limit.MULTIPLY_INT8, threads=self.threads),
        }


def parse(description: str, *, minutes: float, arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="one round of the 0.4b network, shorter cells, no long prompts"
    )
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES), help="may be repeated; both by default")
    parser.add_argument("--rounds", type=int, default=0, help="at most; 3 by default, 1 with --quick")
    parser.add_argument("--minutes", type=float, default=minutes, help="begin no round that would end later")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of every engine; all cores by default")
    parser.add_argument("--only", action="append", default=[], help="part of an engine's name; may be repeated")
    parser.add_argument("--cell", action="append", default=[], help="part of a cell's name; may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / "engines" / "bench", help="for checkpoints and engines")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks", help="for the reports")
    given = parser.parse_args(arguments)
    return Options(
        quick=given.quick,
        shapes=tuple(given.shape or (ALL_SHAPES[:1] if given.quick else ALL_SHAPES)),
        rounds=given.rounds or (1 if given.quick else 3),
        minutes=given.minutes,
        threads=given.threads,
        folder=given.folder.resolve(),
        output=given.output.resolve(),
        only=tuple(given.only),
        cells=tuple(given.cell),
    )


def say(text: str) -> None:
    print(text, flush=True)
