"""manifest.json describes what was built. The builder writes it last, all others read it first.

It holds nothing that changes between two builds of the same input (no time, no path), so it is equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmserve.errors import EngineFileError
from llmserve.models.number_formats import AUTO

FORMAT_VERSION = 1
REBUILD = "build the engine again with: llmserve build CHECKPOINT --output-dir DIRECTORY"


@dataclass(frozen=True, slots=True)
class FileRecord:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that the engine was built from: its content, not its path."""

    digest: str
    architecture: str
    files: tuple[str, ...]
    rounded: str = ""  # a description of its quantized numbers, which were expanded; empty if none were quantized


@dataclass(frozen=True, slots=True)
class Loss:
    """The cost of rounding on a passage of text: the next-token distributions with and without rounding."""

    divergence: float  # mean Kullback-Leibler divergence, in nats
    agreement: float  # share of positions where both have the same best token
    positions: int

    def __str__(self) -> str:
        return (
            f"mean divergence {self.divergence:.2g} nats, the same best token at {self.agreement:.1%} of "
            f"{self.positions} positions"
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that weights were rounded for."""

    sha256: str
    tokens: int  # tokens that were used
    lines: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens of {self.lines:,} lines, sha256 {self.sha256}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`engine_digest` covers what the engine computes, and is the same on every machine. `files` protects the bytes of
    the files, and `prefixes` those of KV blocks computed ahead of time, which are optional."""

    engine_digest: str
    target: str
    device: Mapping[str, Any]  # facts from the target about the device that it compiled for
    source: Source
    options: Mapping[str, Any]  # the resolved build options, including limits
    tensors: Mapping[str, str]  # parameter -> sha256 of its canonical array, before packing
    files: Mapping[str, FileRecord]
    tools: Mapping[str, str]  # program -> version
    calibration: Calibration | None = None
    loss: Loss | None = None  # if weights are rounded, and there is a tokenizer for the passage
    prefixes: Mapping[str, FileRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def dtype(self) -> str:
        """Shown dtype: `float16`, `float16+int8` with quantized weights, `float16+int8+kv-int8` with an int8 cache."""
        cache = self.options.get("kv_cache_dtype", AUTO)
        parts = (self.options["dtype"], self.options["quantization"], "" if cache == AUTO else f"kv-{cache}")
        return "+".join(filter(None, parts))

    def to_json(self) -> str:
        content = json.loads(json.dumps(asdict(self)))
        if not self.prefixes:
            del content["prefixes"]
        return json.dumps({**content, "seal": _seal(content)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check the seal. `EngineFileError` if it is damaged, edited or of another format version."""
        try:
            content = json.loads(text)
            version = content["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EngineFileError(f"manifest.json is damaged ({error!r}); {REBUILD}") from error
        if version != FORMAT_VERSION:
            raise EngineFileError(
                f"the engine has format version {version}, but this llmserve reads version {FORMAT_VERSION}; {REBUILD}"
            )
        if content.pop("seal", None) != _seal(content):
            raise EngineFileError(f"manifest.json was changed after the build; {REBUILD}")
        try:
            return _parse(content)
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineFileError(f"manifest.json lacks a field ({error!r}); {REBUILD}") from error


def _parse(content: dict[str, Any]) -> Manifest:
    options = content["options"]
    if not (isinstance(options["dtype"], str) and isinstance(options["quantization"], str)):
        raise TypeError("options must include dtype and quantization")
    source = content.pop("source")
    files = content.pop("files")
    calibration, loss = content.pop("calibration", None), content.pop("loss", None)
    prefixes = content.pop("prefixes", {})
    return Manifest(
        source=Source(**{**source, "files": tuple(source["files"])}),
        files={name: FileRecord(**record) for name, record in files.items()},
        prefixes={name: FileRecord(**record) for name, record in prefixes.items()},
        calibration=Calibration(**calibration) if calibration else None,
        loss=Loss(**loss) if loss else None,
        **content,
    )


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
