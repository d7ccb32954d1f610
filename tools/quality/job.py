"""The job of a process of `make bench-quality`, as JSON, because the process may run in another environment."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open


@dataclass(frozen=True, slots=True)
class QualityJob:
    """A contestant on a column: a network, and texts as token ids."""

    module: str
    precision: str
    folder: Path  # of the network: its checkpoint, and files made from it
    column: str
    threads: int

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def file(self, name: str) -> Path:
        return self.folder / name

    @property
    def reference(self) -> Path:
        """Float32 logits of every measured position, text after text: [P, V]."""
        return self.file(f"{self.column}-reference.npy")

    @property
    def calibration(self) -> Path:
        """JSON lines of texts that are not measured, for `--calibration-data`."""
        return self.file("calibration.jsonl")

    @property
    def losses(self) -> Path:
        """The losses of this contestant on these texts."""
        texts = zlib.crc32(self._texts_file.read_bytes())
        return self.file(f"{self.column}-{self.module.rpartition('.')[2]}-{self.precision}-{texts:08x}.npz")

    def texts(self) -> Texts:
        return Texts.from_json(self._texts_file.read_text())

    @property
    def _texts_file(self) -> Path:
        return self.file(f"{self.column}-texts.json")

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> QualityJob:
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "folder": Path(values["folder"])})


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of each text. The first `skipped` positions of each are read but not measured."""

    ids: Sequence[Sequence[int]]
    skipped: int = 0

    @property
    def lengths(self) -> list[int]:
        """Measured positions of each text."""
        return [len(ids) - self.skipped for ids in self.ids]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Texts:
        return cls(**json.loads(text))


def num_weights(checkpoint: Path) -> int:
    """Weights of the matrices that are multiplied: all but an embedding that is not the head."""
    shapes = tensor_shapes(checkpoint)
    if "lm_head.weight" in shapes:
        del shapes["model.embed_tokens.weight"]
    return sum(int(np.prod(shape)) for shape in shapes.values() if len(shape) == 2)


def tensor_shapes(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(checkpoint / "model.safetensors", framework="numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
