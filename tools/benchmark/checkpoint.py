"""Random weights in the layout of a Hugging Face folder, written one tensor at a time."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.benchmark.shapes import Shape

WEIGHTS_FILE = "model.safetensors"


def make_checkpoint(folder: Path, shape: Shape) -> Path:
    """`folder` with config.json and float16 weights of `shape`. One that is there is kept: the same shape gives the
    same bytes."""
    if (folder / WEIGHTS_FILE).is_file():
        return folder
    staging = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    (staging / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    _write_weights(staging / WEIGHTS_FILE, shape)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    return folder


def _write_weights(path: Path, shape: Shape) -> None:
    with path.open("wb") as file:
        header = json.dumps(_header(shape)).encode()
        header += b" " * (-len(header) % 8)
        file.write(struct.pack("<Q", len(header)) + header)
        for name, dimensions in shape.tensors():
            file.write(_random_tensor(name, dimensions).data)


def _header(shape: Shape) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dimensions in shape.tensors():
        end = begin + 2 * int(np.prod(dimensions))
        entries[name] = {"dtype": "F16", "shape": dimensions, "data_offsets": [begin, end]}
        begin = end
    return entries


def _random_tensor(name: str, dimensions: tuple[int, ...]) -> NDArray[np.float16]:
    """Of a size that keeps activations near 1 and makes greedy answers vary. Depends on the name only."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(dimensions, np.float32)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.1 * values
    elif "embed_tokens" not in name:
        values *= dimensions[-1] ** -0.5
    return values.astype(np.float16)
