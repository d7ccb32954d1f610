"""The engine directory: names of its files, and opening one safely.

`EngineDirectory.open` refuses missing, truncated, damaged or foreign files, and other versions, before any weight is
read. Small files are hashed at every open, larger ones by `verify`.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.core import EMBEDDINGS, SCORES
from llmserve.engine.base import EngineInfo
from llmserve.engine.directory.manifest import Manifest
from llmserve.errors import EngineFileError, NotFound, raise_problems

MANIFEST_FILE = "manifest.json"
RETIRED_OPTIONS = frozenset({"group_size"})  # options in older manifests that this version does not have
CONFIG_FILE = "config.json"
ENGINE_FILE = "rank0.engine"
SELFTEST_FILE = "selftest.npz"
CACHE_FILE = "model.cache"  # timings of tactics; not in the manifest, because no result depends on them
PROGRAM_FILE = "program.txt"  # the traced network, for information
HF_CONFIG_FILE = "hf_config.json"  # the checkpoint's config.json: role tokens, end tokens
GENERATION_CONFIG_FILE = "generation_config.json"
DRAFT_VOCABULARY_FILE = "draft_vocabulary.npy"  # the tokens of a head that has only some, int32, ascending
LIMITS = ("max_seq_len", "max_batch_size", "max_num_tokens")  # in config.json's build_config
HASHED_AT_OPEN_BYTES = 64 * 2**20
CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class EngineDirectory:
    """A complete engine of this format version. Immutable; keeps no file open."""

    path: Path
    manifest: Manifest
    config: dict[str, Any]  # config.json: pretrained_config and build_config

    @classmethod
    def open(cls, path: Path) -> EngineDirectory:
        """Raises `NotFound` if the path does not exist, `EngineFileError` listing all other problems."""
        manifest = read_manifest(path)
        problems = [text for name in sorted(manifest.files) if (text := _problem(path, manifest, name))]
        raise_problems(EngineFileError, _damaged(path, manifest), problems)
        try:
            config = json.loads((path / CONFIG_FILE).read_text())
            limits = config["pretrained_config"]["vocab_size"], *(config["build_config"][name] for name in LIMITS)
            if not all(type(number) is int for number in limits):
                raise TypeError(f"limits must be integers, got {limits}")
        except (OSError, ValueError, RecursionError) as error:
            raise EngineFileError(f"{path / CONFIG_FILE} cannot be read: {error}") from error
        except (KeyError, TypeError) as error:
            raise EngineFileError(f"{path / CONFIG_FILE} is not an engine's ({error!r}); rebuild it") from error
        return cls(path, manifest, config)

    @property
    def engine_file(self) -> Path:
        return self.path / ENGINE_FILE

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation_config.json; empty if it had none."""
        return self._optional_json(GENERATION_CONFIG_FILE)

    @property
    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's config.json: role token ids and end tokens for the pipeline."""
        return self._optional_json(HF_CONFIG_FILE)

    def info(self) -> EngineInfo:
        limits = self.config["build_config"]
        return EngineInfo(
            name=self.path.resolve().name,
            target=self.manifest.target,
            architecture=self.manifest.source.architecture,
            dtype=self.manifest.dtype,
            digest=self.manifest.engine_digest,
            vocab_size=self.config["pretrained_config"]["vocab_size"],
            max_seq_len=limits["max_seq_len"],
            max_batch_size=limits["max_batch_size"],
            max_num_tokens=limits["max_num_tokens"],
            max_beam_width=limits.get("max_beam_width", 1),
            **self._pooling(),
        )

    @property
    def hidden_width(self) -> int:
        """Width of the hidden rows of another engine that this layer for drafts reads; 0: it is not such a layer."""
        return int(self.config["pretrained_config"].get("hidden_width", 0))

    @property
    def draft_vocabulary(self) -> NDArray[np.int32] | None:
        """The tokens that it can draft, ascending; None: all. Raises `EngineFileError`."""
        if DRAFT_VOCABULARY_FILE not in self.manifest.files:
            return None
        file = self.path / DRAFT_VOCABULARY_FILE
        try:
            found: NDArray[np.int32] = np.load(file, allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise EngineFileError(f"{file} cannot be read: {error}") from error
        ids = np.arange(self.info().vocab_size)
        if found.dtype != np.int32 or not np.array_equal(found, ids[np.isin(ids, found)]):
            raise EngineFileError(f"{file} does not have token ids in ascending order; build the engine again")
        return found

    @property
    def only_drafts(self) -> str:
        """What it is, if it only drafts for other engines; otherwise empty."""
        if self.hidden_width:
            return "a layer for drafts"
        return "an engine with a draft vocabulary" if DRAFT_VOCABULARY_FILE in self.manifest.files else ""

    def _pooling(self) -> dict[str, Any]:
        """The pooling of an engine that does not generate tokens, from `builder.config`."""
        pooling = self.config["pretrained_config"].get("pooling")
        if not isinstance(pooling, dict):
            return {}
        return {
            "pooling": SCORES if pooling["scores"] else EMBEDDINGS,
            "output_width": pooling["width"],
            "scores_with_sigmoid": pooling["sigmoid"],
        }

    def verify(self, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Hash every file again. `EngineFileError` names each one that differs from the manifest."""
        records = {**self.manifest.files, **self.manifest.prefixes}
        problems = [
            f"{name} was changed: its SHA-256 is not the one in the manifest"
            for name, record in sorted(records.items())
            if not (self.path / name).is_file() or hash_file(self.path / name, progress) != record.sha256
        ]
        raise_problems(EngineFileError, _damaged(self.path, self.manifest), problems)

    def _optional_json(self, name: str) -> dict[str, Any]:
        if name not in self.manifest.files:
            return {}
        content: dict[str, Any] = json.loads((self.path / name).read_text())
        return content


def _damaged(path: Path, manifest: Manifest) -> str:
    command = f"llmserve build CHECKPOINT --target {manifest.target} --output-dir {path}"
    return f"{path} is damaged; copy or build it again: {command}"


def rebuild_command(directory: Path) -> str:
    """The command that rebuilds the engine in `directory` with its manifest's options, of any version."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST_FILE).read_text())
        options: dict[str, Any] = manifest["options"]
        given = {name: value for name, value in options.items() if not isinstance(value, dict)}
        for own in options.values():  # options of the target
            given |= own if isinstance(own, dict) else {}
        given |= {"calibration_data": "FILE"} if manifest.get("calibration") else {}
        given |= {"draft_vocabulary": "FILE"} if DRAFT_VOCABULARY_FILE in manifest.get("files", ()) else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        given = {}
    flags = [
        f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
        for name, value in given.items()
        if value and name not in RETIRED_OPTIONS
    ]
    return " ".join(["llmserve build CHECKPOINT", *flags, f"--output-dir {shlex.quote(str(directory))}"])


def hash_file(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> str:
    """SHA-256 in hexadecimal; `progress` receives the bytes of each piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def read_manifest(path: Path) -> Manifest:
    """The manifest of an engine directory; does not check its other files. Raises as `EngineDirectory.open`."""
    if not path.exists():
        raise NotFound(f"no engine directory {path}; build one with: llmserve build CHECKPOINT --output-dir {path}")
    if path.suffix == ".gguf" and path.is_file():
        raise EngineFileError(f"{path} is a GGUF checkpoint, not an engine; compile it first: llmserve build {path}")
    if not path.is_dir():
        raise EngineFileError(f"{path} is a file; an engine is a directory with a {MANIFEST_FILE}")
    try:
        return Manifest.from_json((path / MANIFEST_FILE).read_text())
    except FileNotFoundError:
        raise EngineFileError(_what_it_is_instead(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineFileError(f"{path / MANIFEST_FILE} cannot be read: {error}") from error
    except EngineFileError as error:
        raise EngineFileError(f"{path}: {error}") from error


def _what_it_is_instead(path: Path) -> str:
    """The likely mistake if a directory has no manifest."""
    try:
        config = json.loads((path / CONFIG_FILE).read_text())
    except (OSError, ValueError, RecursionError):
        config = {}
    if "pretrained_config" in config:
        return (
            f"{path} is a TensorRT-LLM engine without llmserve's manifest, which lists its requirements; compile the "
            f"checkpoint that it was made from: llmserve build CHECKPOINT --target tensorrt_llm"
        )
    if "model_type" in config or "architectures" in config:
        return f"{path} is a Hugging Face checkpoint, not an engine; compile it first: llmserve build {path}"
    if next(path.glob("*/config.pbtxt"), None):
        return f"{path} is a model repository, not an engine; serve it with: llmserve serve --model-repository {path}"
    return f"{path} is not an engine directory (no {MANIFEST_FILE}); build one with: llmserve build CHECKPOINT"


def _problem(path: Path, manifest: Manifest, name: str) -> str:
    """The problem with one file, or an empty string."""
    record = manifest.files[name]
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return f"{name!r} is not a valid file name in an engine directory"
    try:
        num_bytes = (path / name).stat().st_size
        if num_bytes != record.num_bytes:
            return f"{name} has {num_bytes} bytes, but the manifest says {record.num_bytes}"
        if num_bytes <= HASHED_AT_OPEN_BYTES and hash_file(path / name) != record.sha256:
            return f"{name} was changed: its SHA-256 is not the one in the manifest"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""
