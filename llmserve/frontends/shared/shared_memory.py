"""System shared memory that clients registered, for tensors of both protocols.

A region is a range of a POSIX shared-memory object. It is read and written through its file descriptor and not mapped:
a client may shrink the object at any time, which is a short read here but a bus error with a mapping. The client owns
the object; unregistering does not delete it.
"""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from llmserve.errors import AlreadyExists, InternalError, InvalidArgument, NotFound, ResourceExhausted, Unsupported

NOT_ALLOWED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
MAX_REGIONS = 1024  # also limited to the number of files that the process may open, divided by `SHARE_OF_FILES`
SHARE_OF_FILES = 4
MAX_NAME = 256  # characters
OBJECTS = Path("/dev/shm")  # where Linux shows POSIX shared memory
RESERVED_PREFIX = "triton_python_backend_shm_region_"  # used by processes that execute Python models
CUDA_REFUSAL = (
    "CUDA shared memory is not available: this server keeps tensors in the memory of the CPU. "
    "Use system shared memory instead"
)


@dataclass(frozen=True, slots=True)
class Region:
    """A registered range of a shared-memory object; `byte_size` and `offset` in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int = field(repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor: a range of a region, in bytes."""

    region: str
    byte_size: int
    offset: int = 0


class SharedMemory:
    """The registered regions of one server. `read` and `write` may be called from any thread; they copy memory.

    Unless it is `allowed`, clients can neither register a region nor use one.
    """

    def __init__(self, *, allowed: bool = False) -> None:
        self._allowed = allowed
        self._regions: dict[str, Region] = {}
        self._lock = threading.Lock()  # held while a descriptor is borrowed or closed, not while it is used

    def register(self, name: str, key: str, *, offset: int, byte_size: int) -> None:
        """Open the object `key`. Raises if it does not exist or is smaller than the region."""
        self.check_allowed()
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if len(name) > MAX_NAME:
            raise InvalidArgument(f"the name of a shared memory region has at most {MAX_NAME} characters")
        if len(self._regions) >= (limit := max_regions()):
            raise ResourceExhausted(f"{limit} shared memory regions are registered, the maximum: unregister one")
        if key.lstrip("/").startswith(RESERVED_PREFIX):
            _refuse(name, f"keys that start with '{RESERVED_PREFIX}' are reserved for the server")
        descriptor = _open_object(key)  # before name and size are checked, as in Triton
        try:
            if not name:
                raise InvalidArgument("a shared memory region must have a name")
            if byte_size < 1:
                _refuse(name, f"its byte_size must be at least 1, got {byte_size}")
            size = os.fstat(descriptor).st_size
            if offset + byte_size > size:
                _refuse(name, f"'{key}' has {size} bytes, but offset {offset} and byte_size {byte_size} were given")
        except BaseException:
            os.close(descriptor)
            raise
        self._regions[name] = Region(name, key, offset, byte_size, descriptor)

    def check_allowed(self) -> None:
        """Raises `Unsupported` unless the operator allowed clients to use shared memory."""
        if not self._allowed:
            raise Unsupported(NOT_ALLOWED)

    def unregister(self, name: str) -> None:
        """Close a region; an unknown name is ignored."""
        self.check_allowed()
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            region = self._regions.pop(name, None)
            if region is not None:
                os.close(region.descriptor)

    def unregister_all(self) -> None:
        self.check_allowed()
        self.close()

    def close(self) -> None:
        """Close all regions."""
        for name in list(self._regions):
            self._forget(name)

    def status(self, name: str = "") -> list[Region]:
        """One region, or all regions sorted by name."""
        if not name:
            return [region for _, region in sorted(self._regions.items())]
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name]]

    def check(self, place: Place) -> Region:
        """The region of `place`, which must lie inside it."""
        self.check_allowed()
        region = self._regions.get(place.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{place.region}'")
        if not 0 <= place.offset < region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{place.region}'")
        if not 0 < place.byte_size <= region.byte_size - place.offset:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{place.region}': it has {region.byte_size} "
                f"bytes, but offset {place.offset} and byte size {place.byte_size} were given"
            )
        return region

    def read(self, place: Place) -> memoryview:
        with self._borrowed(place) as (region, descriptor):
            if os.fstat(descriptor).st_size < region.offset + place.offset + place.byte_size:
                _shrunk(region)
            data = np.empty(place.byte_size, np.uint8).data  # not initialized, unlike a bytearray
            position = region.offset + place.offset
            for part in _parts(data):
                if os.preadv(descriptor, [part], position) != len(part):
                    _shrunk(region)
                position += len(part)
        return data.toreadonly()

    def write(self, place: Place, data: bytes | memoryview, *, output: str) -> None:
        """Store an output's bytes at the start of `place`."""
        if len(data) > place.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{output}' ({place.byte_size} bytes) "
                f"should be at least {len(data)} bytes to hold the results"
            )
        with self._borrowed(place) as (region, descriptor):
            position = region.offset + place.offset
            if os.fstat(descriptor).st_size < position + len(data):
                _shrunk(region)  # writing would enlarge it again
            for part in _parts(memoryview(data)):
                while part:
                    num_written = _written(descriptor, part, position, output)
                    part, position = part[num_written:], position + num_written

    @contextmanager
    def _borrowed(self, place: Place) -> Iterator[tuple[Region, int]]:
        """The region of `place`, with a descriptor that stays open if the region is unregistered in the meantime."""
        with self._lock:
            region = self.check(place)
            descriptor = os.dup(region.descriptor)
        try:
            yield region, descriptor
        finally:
            os.close(descriptor)


def max_regions() -> int:
    """The maximum number of regions. Each has an open file, and connections need files, too."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_REGIONS if num_files == resource.RLIM_INFINITY else min(MAX_REGIONS, num_files // SHARE_OF_FILES)


def _parts(view: memoryview) -> Iterator[memoryview]:
    """Pieces that one system call can copy completely (Linux copies at most 2 GiB)."""
    piece = 1 << 30
    for start in range(0, len(view), piece):
        yield view[start : start + piece]


def _written(descriptor: int, part: memoryview, position: int, output: str) -> int:
    """The number of bytes written, which is smaller than `part` if memory runs out."""
    try:
        return os.pwrite(descriptor, part, position)
    except OSError as error:
        raise InternalError(f"output '{output}' does not fit into shared memory: {error.strerror}") from error


def _open_object(key: str) -> int:
    """A descriptor of the shared-memory object `key`, with or without the leading slash of `shm_open`."""
    if not OBJECTS.is_dir():
        raise Unsupported(f"system shared memory requires {OBJECTS}, which this machine does not have")
    name = key.removeprefix("/")
    if name and name not in (".", "..") and "/" not in name and "\0" not in name:
        with suppress(OSError, ValueError):
            descriptor = os.open(OBJECTS / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
    raise InternalError(f"Unable to open shared memory region: '{key}'")


def _refuse(name: str, problem: str) -> NoReturn:
    raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args: {problem}")


def _shrunk(region: Region) -> NoReturn:
    raise InvalidArgument(
        f"shared memory region '{region.name}' has become smaller than its {region.byte_size} bytes: "
        f"unregister it, and register what is left of '{region.key}'"
    )
