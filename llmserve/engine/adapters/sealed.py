"""The adapter directory: a LoRA adapter in the layout and dtype of one engine, sealed like an engine.

    adapter.json       manifest: base digest, own digest, its matrices, SHA-256 of the other files
    weights.bin        the matrices, row-major, one after the other: of each part `down`, then `up`
    selftest.npz       prompts, and the engine's results for them with the adapter
    adapter_config.json  PEFT's original file, for information

The weights are read into memory and hashed, not mapped: they are small, and truncating a file cannot harm a running
server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.directory.artifact import SELFTEST_FILE
from llmserve.errors import EngineFileError, NotFound
from llmserve.models.number_formats import FLOATS

FORMAT_VERSION = 1
ADAPTER_FILE = "adapter.json"
WEIGHTS_FILE = "weights.bin"
CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
REBUILD = "build it again with: llmserve adapter build ADAPTER --engine ENGINE"


@dataclass(frozen=True, slots=True)
class PartShape:
    """A change to rows [begin, begin + rows) of a parameter of the Program: a product of two thin matrices is added."""

    param: str
    begin: int
    rows: int
    columns: int
    rank: int

    @property
    def num_elements(self) -> int:
        return self.rank * (self.rows + self.columns)


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """`up` [rows, rank] times `down` [rank, columns]; `up` includes alpha."""

    shape: PartShape
    down: NDArray[Any]
    up: NDArray[Any]


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    adapter_digest: str  # of its content: base, parts and numbers
    base_digest: str  # of the engine that it was built for
    source_digest: str  # of PEFT's files
    dtype: str
    parts: tuple[PartShape, ...]
    weights_sha256: str
    config_sha256: str
    format_version: int = FORMAT_VERSION
    selftest_sha256: str = ""  # empty: there is none

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(part.num_elements for part in self.parts) * np.dtype(FLOATS[self.dtype].values).itemsize

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(part.rank for part in self.parts)

    def to_json(self) -> str:
        content = json.loads(json.dumps(asdict(self)))
        return json.dumps({**content, "seal": _seal(content)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> AdapterManifest:
        """Raises EngineFileError if the text is damaged, edited or from another version."""
        try:
            content = json.loads(text)
            version = content["format_version"]
            if version != FORMAT_VERSION:
                raise EngineFileError(f"it has format version {version}, but this llmserve reads {FORMAT_VERSION}")
            if content.pop("seal", None) != _seal(content):
                raise EngineFileError(f"{ADAPTER_FILE} was changed after the build")
            parts = tuple(PartShape(**part) for part in content.pop("parts"))
            found = cls(parts=parts, **content)
            numbers = [value for part in parts for value in (part.begin, part.rows, part.columns, part.rank - 1)]
            if found.dtype not in FLOATS or not parts or not all(type(n) is int and n >= 0 for n in numbers):
                raise TypeError("the matrices are not valid")
            if found.adapter_digest != _digest(found.base_digest, found.dtype, parts, found.weights_sha256):
                raise EngineFileError(f"{ADAPTER_FILE} names a digest that is not its matrices'")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise EngineFileError(f"{ADAPTER_FILE} is damaged ({error!r})") from error
        return found


@dataclass(frozen=True, slots=True)
class SealedAdapter:
    path: Path
    manifest: AdapterManifest

    @classmethod
    def open(cls, path: Path) -> SealedAdapter:
        """Reads no weights. `NotFound` if the path does not exist, `EngineFileError` for any other problem."""
        if not path.exists():
            raise NotFound(f"no adapter directory {path}; build one with: llmserve adapter build")
        try:
            manifest = AdapterManifest.from_json((path / ADAPTER_FILE).read_text())
        except (FileNotFoundError, NotADirectoryError):
            text = f"{path} is not an adapter directory (no {ADAPTER_FILE})"
            raise EngineFileError(f"{text}; {REBUILD}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise EngineFileError(f"{path / ADAPTER_FILE} cannot be read: {error}") from error
        except EngineFileError as error:
            raise EngineFileError(f"adapter {path}: {error}; {REBUILD}") from error
        found = cls(path, manifest)
        found._sealed(CONFIG_FILE, manifest.config_sha256)
        return found

    @property
    def digest(self) -> str:
        return self.manifest.adapter_digest

    def require_base(self, engine_digest: str) -> None:
        """`EngineFileError` unless it was built for this engine."""
        if self.manifest.base_digest != engine_digest:
            raise EngineFileError(
                f"adapter {self.path} was built for the engine {self.manifest.base_digest}, not for {engine_digest}; "
                f"{REBUILD}"
            )

    def verify(self) -> None:
        """Hash every file. `EngineFileError` names a file that differs from the manifest."""
        self._sealed(WEIGHTS_FILE, self.manifest.weights_sha256)
        if self.manifest.selftest_sha256:
            self._sealed(SELFTEST_FILE, self.manifest.selftest_sha256)

    def read(self) -> Sequence[AdapterPart]:
        """Reads all weights; `EngineFileError` if they differ from the manifest."""
        return _split(self._sealed(WEIGHTS_FILE, self.manifest.weights_sha256), self.manifest)

    def _sealed(self, name: str, sha256: str) -> bytes:
        """The content of a file, if it matches the manifest."""
        try:
            content = (self.path / name).read_bytes()
        except OSError as error:
            text = f"adapter {self.path}: {name} cannot be read: {error.strerror}"
            raise EngineFileError(f"{text}; copy it again, or {REBUILD}") from error
        if hashlib.sha256(content).hexdigest() != sha256:
            raise EngineFileError(f"adapter {self.path}: {name} was changed; copy it again, or {REBUILD}")
        return content


def seal_adapter(
    folder: Path, parts: Sequence[AdapterPart], *, base_digest: str, source_digest: str, config: bytes
) -> AdapterManifest:
    """Write the files of an adapter directory; `config` is PEFT's. All matrices have one dtype."""
    weights = b"".join(np.ascontiguousarray(each).tobytes() for part in parts for each in (part.down, part.up))
    (folder / WEIGHTS_FILE).write_bytes(weights)
    (folder / CONFIG_FILE).write_bytes(config)
    shapes, dtype = tuple(part.shape for part in parts), parts[0].down.dtype.name
    weights_sha256 = hashlib.sha256(weights).hexdigest()
    manifest = AdapterManifest(
        adapter_digest=_digest(base_digest, dtype, shapes, weights_sha256),
        base_digest=base_digest,
        source_digest=source_digest,
        dtype=dtype,
        parts=shapes,
        weights_sha256=weights_sha256,
        config_sha256=hashlib.sha256(config).hexdigest(),
    )
    (folder / ADAPTER_FILE).write_text(manifest.to_json())
    return manifest


def _digest(base_digest: str, dtype: str, parts: Sequence[PartShape], weights_sha256: str) -> str:
    content = {
        "format_version": FORMAT_VERSION,
        "base": base_digest,
        "dtype": dtype,
        "parts": [asdict(part) for part in parts],
        "weights": weights_sha256,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _split(content: bytes, manifest: AdapterManifest) -> list[AdapterPart]:
    if len(content) != manifest.num_bytes:
        raise EngineFileError(
            f"{WEIGHTS_FILE} has {len(content)} bytes, but its matrices need {manifest.num_bytes}; {REBUILD}"
        )
    numbers = np.frombuffer(content, FLOATS[manifest.dtype].values)
    found, begin = [], 0
    for part in manifest.parts:
        middle, end = begin + part.rank * part.columns, begin + part.num_elements
        down = numbers[begin:middle].reshape(part.rank, part.columns)
        found.append(AdapterPart(part, down, numbers[middle:end].reshape(part.rows, part.rank)))
        begin = end
    return found


def _seal(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
