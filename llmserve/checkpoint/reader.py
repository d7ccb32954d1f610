"""A checkpoint: a Hugging Face folder in any of the four weight layouts, quantized or not, or a GGUF file.

Nothing in it is ever executed: there is no remote code, and llmserve has its own reader for pickles.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from llmserve.checkpoint.formats.config import CONFIG_KEYS, Quantization, read_quantization
from llmserve.checkpoint.formats.tensors import ExpandedTensors
from llmserve.checkpoint.gguf.file import GgufFile
from llmserve.checkpoint.gguf.parts import SUFFIX, part_paths
from llmserve.checkpoint.json_file import read_json_object
from llmserve.checkpoint.safetensors_file import SafetensorsFile
from llmserve.checkpoint.stored_tensor import DTYPES, Rows, Tensor, TensorFile, TensorInfo, whole
from llmserve.checkpoint.torch_file import TorchFile
from llmserve.errors import CheckpointError, raise_problems

CONFIG_NAME = "config.json"
ENGINE_MANIFEST = "manifest.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME
GENERATION_CONFIG_NAME = "generation_config.json"
SINGLE_NAMES = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DIGEST_CHUNK_BYTES = 1 << 20
LFS_POINTER = b"version https://git-lfs."  # how such a file begins
MAX_LISTED = 40  # a wrong folder has hundreds of problems of one kind


class Checkpoint:
    """An open checkpoint. Use as a context manager, or call `close`."""

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any], files: Mapping[str, TensorFile]
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self._files = files
        self._owner = {name: file for file in files.values() for name in file.tensors}
        self._tensors = {name: file.tensors[name] for name, file in self._owner.items()}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open and check it; no tensor is read. Raises one CheckpointError listing every problem.

        `path` is a folder or a GGUF file. A folder without Hugging Face weights may have one GGUF file instead.
        """
        if path.is_file() and path.suffix == SUFFIX:
            return GgufCheckpoint(path, path)
        if not path.is_dir():
            what = f"is neither a folder nor a {SUFFIX} file" if path.exists() else "does not exist"
            hub = (
                f", or download it first: llmserve pull {path}"
                if HUB_NAME.fullmatch(str(path)) and path.suffix != SUFFIX
                else ""
            )
            raise CheckpointError(f"checkpoint {path} {what}; give a Hugging Face folder or a {SUFFIX} file{hub}")
        if (path / ENGINE_MANIFEST).is_file():
            raise CheckpointError(f"{path} is already an engine; use it, or build from its checkpoint")
        if (gguf := _only_gguf(path)) is not None:
            return GgufCheckpoint(path, gguf)
        problems: list[str] = []
        config = _read_config(path / CONFIG_NAME, problems)
        generation = path / GENERATION_CONFIG_NAME
        generation_config = _read_config(generation, problems) if generation.exists() else {}
        quantization = read_quantization(path, config, problems)
        files = _open_weights(path, problems)
        try:
            raise_problems(CheckpointError, f"checkpoint {path}", problems)
            if quantization is not None:
                return QuantizedCheckpoint(path, config, generation_config, files, quantization)
        except CheckpointError:
            _close_all(files)
            raise
        return cls(path, config, generation_config, files)

    @property
    def file_names(self) -> tuple[str, ...]:
        """The files that `digest` covers: the configuration and the weight files."""
        return (CONFIG_NAME, *sorted(self._files))

    def file(self, name: str) -> Path:
        """The path of one of `file_names`."""
        return self.path / name

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def config_name(self) -> str:
        """The file that determines which tensors must exist."""
        return CONFIG_NAME

    @property
    def is_expanded(self) -> bool:
        """Whether it is not a plain folder that other programs can read."""
        return False

    @property
    def has_text_files(self) -> bool:
        """Whether tokenizer and template are files in its folder."""
        return not self.is_expanded

    @property
    def surplus(self) -> Collection[str]:
        """Meaningless tensors that a network may lack."""
        return ()

    @property
    def rounded_shares(self) -> Mapping[str, float]:
        """The share of numbers stored in each quantized form."""
        return {}

    @property
    def rounded(self) -> str:
        """The same as text; empty if nothing is quantized."""
        return ", ".join(f"{share:.0%} {name}" for name, share in self.rounded_shares.items())

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user about engines made from it."""
        if not self.rounded:
            return ()
        return (
            f"the checkpoint is already quantized ({self.rounded}): its numbers are expanded to the values that they "
            "represent, so an engine cannot be more accurate",
        )

    def stored_name(self, name: str) -> str:
        """A tensor's name in the files."""
        return name

    def text_file(self, name: str) -> bytes | None:
        """A small file of the checkpoint, such as config.json or the tokenizer's; None if missing."""
        path = self.path / name
        if not path.is_file():
            return None
        _check_downloaded(path)
        return path.read_bytes()

    def copy_text_file(self, name: str, place: Path) -> None:
        """Copy the file if the checkpoint has it. Creates the folder, such as that of further chat templates."""
        if (content := self.text_file(name)) is not None:
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(content)

    def read(self, name: str) -> Tensor:
        """The tensor in its own dtype (bfloat16 is ml_dtypes.bfloat16), read lazily if the format allows it."""
        return whole(self.rows(name))

    def rows(self, name: str) -> Rows:
        """The same, in pieces; if the format allows it, only the requested rows are in memory."""
        return self._stored(name)

    def _stored(self, name: str) -> Rows:
        file = self._owner.get(name)
        if file is None:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {name}")
        if (dtype := self._tensors[name].dtype) not in DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {dtype}, which is not supported")
        return file.read(name)

    def digest(self, progress: Callable[[str, int], None] = lambda name, num_bytes: None) -> str:
        """SHA-256 (hex) over the names and contents of config.json and the weight files. Reads all of them.

        `progress` receives the file's name and the bytes of each piece.
        """
        digest = hashlib.sha256()
        for name in self.file_names:
            file = self.file(name)
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(DIGEST_CHUNK_BYTES):
                    digest.update(chunk)
                    progress(name, len(chunk))
        return digest.hexdigest()

    def close(self) -> None:
        _close_all(self._files)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class QuantizedCheckpoint(Checkpoint):
    """A folder whose weights are expanded when they are read. Its config is that of the original model."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        files: Mapping[str, TensorFile],
        quantization: Quantization,
    ) -> None:
        original = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
        super().__init__(path, original, generation_config, files)
        self._quantization = quantization
        problems: list[str] = []
        self._expanded = ExpandedTensors(self._tensors, self._read_stored, quantization.format, problems)
        if len(problems) > MAX_LISTED:
            problems[MAX_LISTED:] = [f"... and {len(problems) - MAX_LISTED} more"]
        raise_problems(CheckpointError, f"checkpoint {path} does not fit its {quantization.source}", problems)

    def _read_stored(self, name: str) -> Tensor:
        return whole(self._stored(name))

    @property
    def file_names(self) -> tuple[str, ...]:
        return (*self._quantization.files, *super().file_names)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._expanded.tensors

    @property
    def is_expanded(self) -> bool:
        return True

    @property
    def surplus(self) -> Collection[str]:
        return self._expanded.surplus

    @property
    def rounded_shares(self) -> Mapping[str, float]:
        return self._expanded.shares

    def stored_name(self, name: str) -> str:
        return self._expanded.stored_name(name)

    def text_file(self, name: str) -> bytes | None:
        if name == CONFIG_NAME:
            return (json.dumps(self.config, indent=2) + "\n").encode()
        return super().text_file(name)

    def rows(self, name: str) -> Rows:
        expanded = self._expanded.rows(name)
        return self._stored(name) if expanded is None else expanded


class GgufCheckpoint(Checkpoint):
    """`path` as given by the user: `file`, or its folder.

    A folder's own tokenizer is preferred to the file's. If `path` is a file, other files in its folder are ignored.
    """

    def __init__(self, path: Path, file: Path) -> None:
        for part in part_paths(file):
            if part.is_file():
                _check_downloaded(part)
        has_tokenizer = path.is_dir() and any((path / name).is_file() for name in TOKENIZER_NAMES)
        self._gguf = GgufFile(file, with_tokenizer=not has_tokenizer)
        self._file = file
        super().__init__(path, self._gguf.config, self._gguf.generation_config, {file.name: self._gguf})

    @property
    def file_names(self) -> tuple[str, ...]:
        return tuple(path.name for path in self._gguf.paths)

    def file(self, name: str) -> Path:
        return self._file.parent / name

    @property
    def is_expanded(self) -> bool:
        return True

    @property
    def config_name(self) -> str:
        return "metadata"

    @property
    def rounded_shares(self) -> Mapping[str, float]:
        return self._gguf.rounded_shares

    def stored_name(self, name: str) -> str:
        return self._gguf.stored_name(name)

    def text_file(self, name: str) -> bytes | None:
        made = self._gguf.texts.get(name)
        return super().text_file(name) if made is None and self.path.is_dir() else made


def _only_gguf(folder: Path) -> Path | None:
    """The one GGUF file of a folder without other weights, or one of its parts. Raises CheckpointError when there are
    several."""
    if any((folder / name).exists() for name in (*SINGLE_NAMES, *INDEX_NAMES)):
        return None
    found = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())
    if found and not set(found) <= set(part_paths(found[0])):
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"checkpoint {folder} has several {SUFFIX} files ({names}); give the one to build from")
    return found[0] if found else None


def read_config(path: Path) -> dict[str, Any]:
    """A checkpoint's config, whether or not the folder has weights. Raises CheckpointError."""
    if path.is_dir() and (path / CONFIG_NAME).is_file():
        config = read_json_object(path / CONFIG_NAME)
        return {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    with Checkpoint.open(path) as checkpoint:
        return checkpoint.config


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}


def _open_weights(path: Path, problems: list[str]) -> dict[str, TensorFile]:
    """The weight files by name, in transformers' order of preference."""
    for single, index in zip(SINGLE_NAMES, INDEX_NAMES, strict=True):
        if (path / single).exists():
            return _open_files(path, [single], problems)
        if (path / index).exists():
            return _open_shards(path, index, problems)
    problems.append(f"no weights: none of {', '.join((*SINGLE_NAMES, *INDEX_NAMES))} is there")
    return {}


def _open_shards(path: Path, index: str, problems: list[str]) -> dict[str, TensorFile]:
    """Open the shards in the index, and check its entries for them."""
    weight_map = _read_config(path / index, problems).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        problems.append(f"{index} must have a weight_map from tensor names to file names")
        return {}
    shards = sorted(set(weight_map.values()))
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        problems.extend(f"{index} names {shard!r}, which is not a plain file name" for shard in outside)
        return {}
    files = _open_files(path, shards, problems)
    problems.extend(
        f"{index} lists tensor {name} in {shard}, which does not have it"
        for name, shard in weight_map.items()
        if shard in files and name not in files[shard].tensors
    )
    return files


def _open_files(path: Path, names: Sequence[str], problems: list[str]) -> dict[str, TensorFile]:
    files: dict[str, TensorFile] = {}
    owner: dict[str, str] = {}
    for name in names:
        try:
            if not (path / name).is_file():
                raise CheckpointError(f"{name} is missing")
            _check_downloaded(path / name)
            files[name] = SafetensorsFile(path / name) if name.endswith(".safetensors") else TorchFile(path / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems.extend(
            f"tensor {tensor} is in both {owner[tensor]} and {name}"
            for tensor in files[name].tensors
            if owner.setdefault(tensor, name) != name
        )
    return files


def _check_downloaded(file: Path) -> None:
    """A clone without Git LFS has small text files instead of large files."""
    with file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder, or download it"
            )


def _close_all(files: Mapping[str, TensorFile]) -> None:
    for file in files.values():
        file.close()
