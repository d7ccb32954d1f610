"""The files of a GGUF checkpoint: one, or the parts that llama.cpp's gguf-split makes of it.

All metadata is in the first part, which may have no tensors. The others only say which part they are.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.gguf.header import Header, Metadata, StoredBlocks, read_header
from llmserve.errors import CheckpointError, raise_problems

SUFFIX = ".gguf"
PART_NAME = re.compile(rf"(.+)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}", re.DOTALL)
MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Stored:
    """What the files hold together. `StoredBlocks.part` is a place in `paths` and `contents`."""

    paths: tuple[Path, ...]
    contents: list[NDArray[np.uint8]]  # mapped
    metadata: Metadata
    tensors: Mapping[str, StoredBlocks]


def model_name(file_name: str) -> str:
    """Of a GGUF file or any of its parts: the name without suffix and number."""
    found = PART_NAME.fullmatch(file_name)
    return found[1] if found else file_name.removesuffix(SUFFIX)


def part_paths(path: Path) -> tuple[Path, ...]:
    """All parts that the name of one of them implies, whether they exist or not; `path` alone for another name."""
    if (found := PART_NAME.fullmatch(path.name)) is None:
        return (path,)
    return tuple(path.with_name(f"{found[1]}-{no:05}-of-{found[3]}{SUFFIX}") for no in range(1, int(found[3]) + 1))


def open_parts(path: Path) -> Stored:
    """`path` is the file, or any of its parts. Raises CheckpointError if parts are missing or do not fit together."""
    content, header = _open(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return Stored((path,), [content], header.metadata, header.tensors)
    paths = part_paths(path)
    if len(paths) != count:
        raise CheckpointError(
            f"{path.name} is one of {count!r} parts, but its name does not say so; rename the parts to "
            f"NAME-00001-of-0000N{SUFFIX} and so on, as gguf-split names them"
        )
    if missing := [part.name for part in paths if not part.is_file()]:
        names = ", ".join(missing[:MAX_LISTED]) + (" and more" if len(missing) > MAX_LISTED else "")
        raise CheckpointError(f"{path.name} is one of {count} parts, and these are missing beside it: {names}")
    opened = [(content, header) if part == path else _open(part) for part in paths]
    headers = {part.name: header for part, (_, header) in zip(paths, opened, strict=True)}
    raise_problems(CheckpointError, f"the parts of {model_name(path.name)} do not fit together", _problems(headers))
    tensors = {
        name: replace(stored, part=part)
        for part, header in enumerate(headers.values())
        for name, stored in header.tensors.items()
    }
    return Stored(paths, [content for content, _ in opened], opened[0][1].metadata, tensors)


def _problems(headers: Mapping[str, Header]) -> list[str]:
    problems: list[str] = []
    owner: dict[str, str] = {}
    for place, (name, header) in enumerate(headers.items()):
        for key, wanted in (("split.no", place), ("split.count", len(headers))):
            if (found := header.metadata.get(key)) != wanted:
                problems.append(f"{name} has {key} {found!r} instead of {wanted}")
        problems += [
            f"tensor {tensor} is both in {owner[tensor]} and in {name}"
            for tensor in header.tensors
            if owner.setdefault(tensor, name) != name
        ]
    total, claimed = len(owner), next(iter(headers.values())).metadata.get("split.tensors.count")
    if claimed is not None and claimed != total:
        problems.append(f"they have {total} tensors, but split.tensors.count is {claimed!r}")
    return problems


def _open(path: Path) -> tuple[NDArray[np.uint8], Header]:
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path.name} is empty; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        return np.frombuffer(data, np.uint8), read_header(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name} cannot be used: {error}") from error
