"""The engine digest: what an engine computes, whatever machine it was built on and however it is laid out there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.engine.manifest import FORMAT_VERSION
from llmserve.models.graph import Program


def tensor_digest(array: NDArray[Any]) -> str:
    """SHA-256 over dtype, shape and little-endian row-major bytes. Contiguous arrays are hashed in place."""
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    contiguous = np.ascontiguousarray(array)
    if contiguous.nbytes:
        digest.update(contiguous.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def engine_digest(program: Program, options: BuildOptions, tensors: Mapping[str, str]) -> str:
    """SHA-256 over format version, resolved options, the whole Program and the digest of each parameter.

    `tensors` also has what parameters are multiplied with before they are rounded.
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
