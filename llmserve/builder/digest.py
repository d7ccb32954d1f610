"""The engine digest identifies what an engine computes, regardless of the build machine and the file layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from llmserve.builder.options import BuildOptions
from llmserve.builder.pieces import Weight, row_pieces
from llmserve.engine.directory.manifest import FORMAT_VERSION
from llmserve.models.graph import Program


class Tensor(Weight, Protocol):
    """A weight that knows its dtype. An array qualifies."""

    @property
    def dtype(self) -> np.dtype[Any]: ...


def tensor_digest(tensor: Tensor, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """SHA-256 over dtype, shape and little-endian row-major bytes. `advance` receives the bytes of each piece."""
    digest = hashlib.sha256(f"{tensor.dtype.name} {tensor.shape} ".encode())
    for rows in row_pieces(tensor.shape):
        piece = np.ascontiguousarray(tensor[rows])
        digest.update(piece.reshape(-1).view(np.uint8).data)
        advance(piece.nbytes)
    return digest.hexdigest()


def engine_digest(program: Program, options: BuildOptions, tensors: Mapping[str, str]) -> str:
    """SHA-256 over format version, resolved options, the whole Program and the digest of each parameter.

    `tensors` also has the factors that multiply parameters before they are rounded.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "options": options.as_dict(),
        "cache": asdict(program.cache),
        "vocab_size": program.vocab_size,
        "ops": [
            [op.kind.value, op.inputs, op.output, op.width, op.weights, sorted(op.attrs.items())] for op in program.ops
        ],
        "tensors": sorted(tensors.items()),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
