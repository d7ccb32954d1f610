"""Caches answers for repeated requests: one cache per server, which evicts the least recently used entries."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from llmserve.errors import InvalidArgument
from llmserve.serving.types import InferRequest, InferResponse, Tensor

ELEMENT_BYTES = 64  # bookkeeping of one BYTES element, roughly
ENTRY_BYTES = 512  # the same, of one response


@dataclass(slots=True)
class CacheCounters:
    """Counters since the server was started."""

    num_lookups: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    lookup_ns: int = 0
    insertion_ns: int = 0

    @property
    def num_misses(self) -> int:
        return self.num_lookups - self.num_hits


class ResponseCache:
    """Caches responses. Call it on the event loop. Keys come from `response_key`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.counters = CacheCounters()
        self._entries: OrderedDict[bytes, tuple[InferResponse, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def utilization(self) -> float:
        """The used fraction of the cache, from 0 to 1."""
        return self.num_bytes / self.max_bytes

    def lookup(self, key: bytes) -> InferResponse | None:
        start_ns = time.monotonic_ns()
        self.counters.num_lookups += 1
        entry = self._entries.get(key)
        if entry is not None:
            self.counters.num_hits += 1
            self._entries.move_to_end(key)
        self.counters.lookup_ns += time.monotonic_ns() - start_ns
        return None if entry is None else entry[0]

    def insert(self, key: bytes, response: InferResponse) -> None:
        """Keep a copy. A response that is larger than the whole cache is not kept."""
        start_ns = time.monotonic_ns()
        size = _size(response)
        if size <= self.max_bytes:
            self._drop(key)
            while self.num_bytes + size > self.max_bytes:
                self._drop(next(iter(self._entries)))
                self.counters.num_evictions += 1
            self._entries[key] = (_copy(response), size)
            self.num_bytes += size
        self.counters.insertion_ns += time.monotonic_ns() - start_ns

    def drop_model(self, prefix: bytes) -> None:
        """Forget the answers of a model that is not served any more."""
        for key in [key for key in self._entries if key.startswith(prefix)]:
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        _, size = self._entries.pop(key, (None, 0))
        self.num_bytes -= size


def response_key(prefix: bytes, request: InferRequest) -> bytes:
    """A hash of the inputs and the requested outputs. Parameters are not part of it, as in Triton."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(request.inputs):
        tensor = request.inputs[name]
        _feed(digest.update, f"{name}\0{tensor.datatype}\0{tensor.shape}\0".encode())
        if tensor.datatype == "BYTES":
            for element in tensor.data.flat:
                _feed(digest.update, element)
        else:
            digest.update(np.ascontiguousarray(tensor.data).data)
    for names in (request.requested_outputs, request.needed_outputs):
        _feed(digest.update, "\0".join(sorted(names)).encode())
    return prefix + digest.digest()


def _feed(update: Callable[[bytes], None], data: bytes) -> None:
    update(len(data).to_bytes(8, "little"))
    update(data)


def _size(response: InferResponse) -> int:
    return ENTRY_BYTES + sum(map(_tensor_size, response.outputs))


def _tensor_size(tensor: Tensor) -> int:
    size: int = tensor.data.nbytes
    if tensor.datatype == "BYTES":
        size += sum(len(element) + ELEMENT_BYTES for element in tensor.data.flat)
    return size


def _copy(response: InferResponse) -> InferResponse:
    """A copy with its own arrays: an output may be a view of a much larger array, or be reused by its model."""
    outputs = tuple(Tensor(tensor.name, tensor.datatype, tensor.data.copy()) for tensor in response.outputs)
    return replace(response, outputs=outputs)


def parse_cache_config(text: str) -> int:
    """Bytes of the cache that `--cache-config` describes, such as "local,size=1048576"."""
    name, _, setting = text.partition(",")
    key, _, value = setting.partition("=")
    if name != "local":
        raise InvalidArgument(f"--cache-config {text}: unknown cache '{name}'; the only one is local,size=BYTES")
    if key != "size" or not value.isascii() or not value.isdigit() or int(value) < 1:
        raise InvalidArgument(f"--cache-config {text}: expected local,size=BYTES, such as local,size=1048576")
    return int(value)
