"""A Hugging Face folder: its configuration and its tensors, in whichever of the four weight layouts.

Nothing of the folder is ever executed: no remote code, and pickles are read by our own reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from llmserve.checkpoint.json_file import read_json_object
from llmserve.checkpoint.safetensors_file import SafetensorsFile
from llmserve.checkpoint.stored_tensor import DTYPES, Tensor, TensorFile, TensorInfo
from llmserve.checkpoint.torch_file import TorchFile
from llmserve.errors import CheckpointError, raise_problems

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
SINGLE_NAMES = ("model.safetensors", "pytorch_model.bin")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DIGEST_CHUNK_BYTES = 1 << 20


class Checkpoint:
    """An open checkpoint folder. Use as a context manager, or call `close`."""

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
        """Open and check the folder; no tensor is read. Raises one CheckpointError listing every problem."""
        if not path.is_dir():
            raise CheckpointError(f"checkpoint {path} is not a folder")
        problems: list[str] = []
        config = _read_config(path / CONFIG_NAME, problems)
        generation = path / GENERATION_CONFIG_NAME
        generation_config = _read_config(generation, problems) if generation.exists() else {}
        files = _open_weights(path, problems)
        try:
            raise_problems(CheckpointError, f"checkpoint {path}", problems)
        except CheckpointError:
            _close_all(files)
            raise
        return cls(path, config, generation_config, files)

    @property
    def file_names(self) -> tuple[str, ...]:
        """What `digest` covers: the configuration and the weight files."""
        return (CONFIG_NAME, *sorted(self._files))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        """The tensor in its own dtype (bfloat16 is ml_dtypes.bfloat16), lazily where the format allows it."""
        file = self._owner.get(name)
        if file is None:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {name}")
        if (dtype := self._tensors[name].dtype) not in DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {dtype}, which we cannot read")
        return file.read(name)

    def digest(self, progress: Callable[[str, int], None] = lambda name, num_bytes: None) -> str:
        """SHA-256 (hex) over the names and contents of config.json and the weight files. Reads all of them.

        `progress` is told the file and the bytes of each piece.
        """
        digest = hashlib.sha256()
        for name in self.file_names:
            file = self.path / name
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
    """Open the shards that the index names, and check that it tells the truth about them."""
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
        f"{index} says that {shard} has tensor {name}, but it has not"
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
            files[name] = SafetensorsFile(path / name) if name.endswith(".safetensors") else TorchFile(path / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems.extend(
            f"tensor {tensor} is both in {owner[tensor]} and in {name}"
            for tensor in files[name].tensors
            if owner.setdefault(tensor, name) != name
        )
    return files


def _close_all(files: Mapping[str, TensorFile]) -> None:
    for file in files.values():
        file.close()
