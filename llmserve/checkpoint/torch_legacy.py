"""A pytorch_model.bin as written by torch before 1.6: consecutive pickles, then the storages' bytes.

magic number, protocol version, facts of the machine, the tensors, the storages' keys
for each key: its number of elements (int64), then the elements
"""

from __future__ import annotations

import io
import pickletools
import struct

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.stored_tensor import DTYPES
from llmserve.checkpoint.torch_pickle import StoredTensor, load_tensors, unpickle
from llmserve.errors import CheckpointError

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
HEAD = b"\x80\x02\x8a\n" + MAGIC.to_bytes(10, "little") + b"."
COUNT = struct.Struct("<q")
MAX_PICKLE_BYTES = 16 << 20  # a hundred times what a large network needs


def read_legacy(content: NDArray[np.uint8]) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """The tensors, and the start of each storage in the file. Raises CheckpointError as `load_tensors` does."""
    place = len(HEAD)
    pickles = []
    for _ in range(4):
        pickles.append(_pickle_at(content, place))
        place += len(pickles[-1])
    version, machine, tensors, keys = pickles
    if unpickle(version) != PROTOCOL:
        raise CheckpointError(f"was written by a torch with another protocol than {PROTOCOL}; save it again with torch")
    facts = unpickle(machine)
    if not isinstance(facts, dict) or dict.get(facts, "little_endian") is not True:
        raise CheckpointError("was written on a big-endian machine; save it again on a little-endian one")
    stored = load_tensors(tensors)
    return stored, _offsets(content, place, unpickle(keys), stored)


def _pickle_at(content: NDArray[np.uint8], place: int) -> bytes:
    stream = io.BytesIO(content[place : place + MAX_PICKLE_BYTES].tobytes())
    try:
        for _ in pickletools.genops(stream):
            pass
    except Exception as error:  # a damaged or hostile pickle can fail in any way
        raise CheckpointError(f"has a damaged pickle: {type(error).__name__}: {error}") from error
    return stream.getvalue()[: stream.tell()]


def _offsets(content: NDArray[np.uint8], place: int, keys: object, stored: dict[str, StoredTensor]) -> dict[str, int]:
    """Storages follow each other in the order of `keys`, so the size of each must be known."""
    storages = {tensor.storage.key: tensor.storage for tensor in stored.values()}
    are_equal = all(tensor.storage == storages[tensor.storage.key] for tensor in stored.values())
    if not are_equal or not isinstance(keys, list) or sorted(map(str, keys)) != sorted(storages):
        raise CheckpointError("is damaged: its storages are not those of its tensors")
    found = {}
    for key in keys:
        storage = storages[key]
        head = content[place : place + COUNT.size].tobytes()
        begin = place + COUNT.size
        place = begin + storage.num_elements * DTYPES[storage.dtype].itemsize
        if len(head) < COUNT.size or COUNT.unpack(head)[0] != storage.num_elements or place > len(content):
            raise CheckpointError(f"is damaged: storage {key!r} does not have {storage.num_elements} elements")
        found[key] = begin
    return found
