"""Random weights in the layout of a Hugging Face folder, written one tensor at a time."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

WEIGHTS_FILE = "model.safetensors"
PACKED = ("_blocks", "_scales")  # suffixes of gpt-oss's tensors of experts


class Described(Protocol):
    """A network; see `shapes.Shape`."""

    def config(self) -> dict[str, Any]: ...

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]: ...


def make_checkpoint(folder: Path, shape: Described) -> Path:
    """Makes `folder` with config.json and weights of `shape`: float16, and gpt-oss's experts in MXFP4. An existing one
    is kept, because the same shape gives the same bytes."""
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


def _write_weights(path: Path, shape: Described) -> None:
    with path.open("wb") as file:
        header = json.dumps(_header(shape)).encode()
        header += b" " * (-len(header) % 8)
        file.write(struct.pack("<Q", len(header)) + header)
        for name, dimensions in shape.tensors():
            file.write(_random_tensor(name, dimensions).data)


def _header(shape: Described) -> dict[str, Any]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dimensions in shape.tensors():
        is_packed = name.endswith(PACKED)
        end = begin + (1 if is_packed else 2) * int(np.prod(dimensions))
        entries[name] = {
            "dtype": "U8" if is_packed else "F16", "shape": dimensions, "data_offsets": [begin, end]
        }  # fmt: skip
        begin = end
    return entries


def _random_tensor(name: str, dimensions: tuple[int, ...]) -> NDArray[Any]:
    """Returns numbers whose size keeps activations near 1 and makes greedy answers vary. Only the name matters."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("_scales"):  # exponents, with 127 for 1
        return random.integers(119, 122, dimensions, np.uint8)
    if name.endswith("_blocks"):
        low, high = (random.integers(0, 15, dimensions, np.uint8) for _ in range(2))
        packed: NDArray[Any] = low + (low > 7) | high + (high > 7) << 4  # GGUF has no code 8, negative zero
        return packed
    values = random.standard_normal(dimensions, np.float32)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.1 * values
    elif "embed_tokens" not in name:
        values *= dimensions[-1] ** -0.5
    return values.astype(np.float16)
