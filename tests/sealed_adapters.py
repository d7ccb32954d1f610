"""Adapter directories made from arrays, without PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llmserve.engine.adapters.sealed import AdapterPart, PartShape, SealedAdapter, seal_adapter
from llmserve.models.number_formats import FLOATS

Rows = tuple[int, int]


def random_parts(
    matrices: Mapping[str, tuple[int, int]],
    *,
    dtype: str = "float32",
    seed: int = 0,
    ranks: Sequence[int] = (4, 1, 16, 33),
    cuts: Mapping[str, Sequence[Rows]] | None = None,
) -> list[AdapterPart]:
    """For matrices of these shapes; `cuts` says which rows of a matrix have a part of their own: all, by default."""
    rng, values = np.random.default_rng(seed), np.dtype(FLOATS[dtype].values)
    found: list[AdapterPart] = []
    for name, (height, depth) in matrices.items():
        for begin, end in (cuts or {}).get(name, ((0, height),)):
            rank = ranks[len(found) % len(ranks)]
            down = rng.standard_normal((rank, depth)) / np.sqrt(depth)
            up = 0.3 * rng.standard_normal((end - begin, rank))
            shape = PartShape(name, begin, end - begin, depth, rank)
            found.append(AdapterPart(shape, down.astype(values), up.astype(values)))
    return found


def sealed(path: Path, parts: Sequence[AdapterPart], base_digest: str = "0" * 64) -> SealedAdapter:
    path.mkdir(parents=True)
    seal_adapter(path, parts, base_digest=base_digest, source_digest="1" * 64, config=b"{}")
    return SealedAdapter.open(path)
