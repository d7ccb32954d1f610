"""Factors of a build's matrices before rounding: powers of two, moved between neighbouring matrices.

They change no result, and computing does not use them. Additions to such a matrix must be multiplied, too.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import EngineFileError

FACTORS_FILE = "factors.npz"  # in engines with rounded weights
PowersOfTwo: TypeAlias = Mapping[str, NDArray[np.float32]]  # by parameter


@dataclass(frozen=True, slots=True)
class Factors:
    rows: PowersOfTwo = field(default_factory=dict)
    columns: PowersOfTwo = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Stored as exponents."""
        sets = {"rows": self.rows, "columns": self.columns}
        found: dict[str, Any] = {
            f"{kind} {name}": np.rint(np.log2(powers)).astype(np.int8)
            for kind, all_of in sets.items()
            for name, powers in sorted(all_of.items())
        }
        np.savez(path, **found)

    @classmethod
    def load(cls, path: Path) -> Factors:
        found: dict[str, dict[str, NDArray[np.float32]]] = {"rows": {}, "columns": {}}
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                for key in arrays.files:
                    kind, _, name = key.partition(" ")
                    found[kind][name] = np.exp2(arrays[key].astype(np.float32))
        except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise EngineFileError(f"{path.name} cannot be read: {error}") from error
        return cls(**found)
