"""Typed access to the metadata of a GGUF file. A bad value is reported and replaced by a harmless one."""

from __future__ import annotations

import math
import reprlib

import numpy as np

from llmserve.checkpoint.gguf.header import Metadata

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000


class MetadataReader:
    """`architecture` replaces `{}` in keys."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.problems: list[str] = []

    def has(self, key: str) -> bool:
        return self.key(key) in self.metadata

    def key(self, key: str) -> str:
        return key.replace("{}", self.architecture)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.metadata.get(self.key(key), default)
        if type(value) is int and minimum <= value <= MAX_SIZE:
            return value
        self._wrong(key, f"an integer from {minimum} to {MAX_SIZE}")
        return minimum

    def counts(self, key: str, length: int) -> list[int]:
        """A number for each layer; the file may have one number for all."""
        value, length = self.metadata.get(self.key(key)), min(length, MAX_LAYERS)
        found = np.full(length, value) if type(value) is int else value
        if isinstance(found, np.ndarray) and found.dtype.kind in "iu" and found.shape == (length,):
            counts = [int(count) for count in found]
            if all(0 <= count <= MAX_SIZE for count in counts):
                return counts
        self._wrong(key, f"{length} whole numbers")
        return [1] * length

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(self.key(key), default)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            return float(value)
        self._wrong(key, "a positive number")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(self.key(key), default)
        if isinstance(value, bool):
            return value
        self._wrong(key, "true or false")
        return default

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(self.key(key), default)
        if isinstance(value, str):
            return value
        self._wrong(key, "a string")
        return ""

    def texts(self, key: str) -> list[str]:
        value = self.metadata.get(self.key(key))
        if isinstance(value, list):
            return value
        self._wrong(key, "an array of strings")
        return []

    def _wrong(self, key: str, wanted: str) -> None:
        value = self.metadata.get(self.key(key))
        found = "it is missing" if value is None else f"it is {reprlib.repr(value)}"
        self.problems.append(f"metadata {self.key(key)} must be {wanted}; {found}")
