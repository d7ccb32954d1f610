"""A pytorch_model.bin, read without torch.

Since torch 1.6 it is a zip archive: data.pkl describes the tensors, and each storage is an uncompressed entry. Older
files are read by torch_legacy.py. Storages are mapped, so a tensor costs nothing until its pages are touched.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from llmserve.checkpoint.stored_tensor import DTYPES, Tensor, TensorInfo
from llmserve.checkpoint.torch_legacy import HEAD, read_legacy
from llmserve.checkpoint.torch_pickle import StoredTensor, load_tensors
from llmserve.errors import CheckpointError

LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature; lengths of the file name and the extra field
LOCAL_SIGNATURE = b"PK\x03\x04"


class TorchFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
            if self._bytes[: len(HEAD)].tobytes() == HEAD:
                self._stored, self._offsets = read_legacy(self._bytes)
            else:
                with zipfile.ZipFile(path) as archive:
                    self._stored = self._read_directory(archive)
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"{path.name} is damaged, or is not a torch file: {error}") from error
        except (OSError, ValueError, EOFError, RuntimeError, struct.error) as error:
            raise CheckpointError(f"{path.name} is damaged: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{path.name} {error}") from error
        self._tensors = {name: _info(tensor) for name, tensor in self._stored.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> Tensor:
        tensor = self._stored[name]
        dtype = DTYPES[tensor.storage.dtype]
        storage = np.frombuffer(
            self._bytes, dtype, count=tensor.storage.num_elements, offset=self._offsets[tensor.storage.key]
        )
        strides = tuple(step * dtype.itemsize for step in tensor.stride)
        view: Tensor = as_strided(storage[tensor.offset :], tensor.shape, strides, writeable=False)
        return view

    def close(self) -> None:
        self._stored = {}
        self._bytes = np.empty(0, np.uint8)

    def _read_directory(self, archive: zipfile.ZipFile) -> dict[str, StoredTensor]:
        """Describe the tensors, and find the file offset of every storage that they use."""
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"is not a torch checkpoint: it has {len(pickles)} entries named data.pkl, not one")
        root = pickles[0].removesuffix("data.pkl")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise CheckpointError("has compressed entries, which torch does not write; save it again with torch")
        if f"{root}byteorder" in entries and archive.read(f"{root}byteorder") != b"little":
            raise CheckpointError("was written on a big-endian machine; save it again on a little-endian one")
        stored = load_tensors(archive.read(pickles[0]))
        self._offsets = {
            tensor.storage.key: self._storage_offset(entries.get(f"{root}data/{tensor.storage.key}"), tensor)
            for tensor in stored.values()
        }
        return stored

    def _storage_offset(self, entry: zipfile.ZipInfo | None, tensor: StoredTensor) -> int:
        storage = tensor.storage
        wanted = storage.num_elements * DTYPES[storage.dtype].itemsize
        if entry is None or entry.file_size < wanted:
            found = 0 if entry is None else entry.file_size
            raise CheckpointError(f"is damaged: storage {storage.key!r} needs {wanted} bytes but has {found}")
        header = bytes(self._bytes[entry.header_offset : entry.header_offset + LOCAL_HEADER.size])
        signature, name_length, extra_length = LOCAL_HEADER.unpack(header)
        offset: int = entry.header_offset + LOCAL_HEADER.size + name_length + extra_length
        if signature != LOCAL_SIGNATURE or offset + wanted > len(self._bytes):
            raise CheckpointError(f"is damaged: storage {storage.key!r} is outside the file")
        return offset


def _info(tensor: StoredTensor) -> TensorInfo:
    info = TensorInfo(tensor.storage.dtype, tensor.shape, 0)
    return TensorInfo(info.dtype, info.shape, info.num_elements * DTYPES[info.dtype].itemsize)
