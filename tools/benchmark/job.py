"""The job and the report of a measuring process: JSON, because the process may run in another environment."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tools.benchmark.cells import Cell
from tools.benchmark.shapes import SHAPES, Shape


class Prepared(Protocol):
    """Data that a peer needs to make its own files from a checkpoint."""

    @property
    def precision(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def checkpoint(self) -> Path: ...

    def file(self, name: str) -> Path:
        """The path of a file that is made from the checkpoint for this engine, and kept."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    module: str
    precision: str
    shape_name: str
    folder: Path  # for checkpoints and files made from them
    threads: int
    cells: tuple[Cell, ...]
    passes: int = 2  # over all cells
    max_seconds: float = 4.0  # of a decode cell
    seed: int = 0
    adapter: str = ""  # a PEFT LoRA adapter for all sequences, in a folder of `folder`; empty: none

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.shape_name}"

    def file(self, name: str) -> Path:
        """The path of a file that is made from the checkpoint for this engine, and kept."""
        return self.folder / f"{self.shape_name}-{name}"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Job:
        values: dict[str, Any] = json.loads(text)
        values["folder"] = Path(values["folder"])
        values["cells"] = tuple(Cell(**cell) for cell in values["cells"])
        return cls(**values)
