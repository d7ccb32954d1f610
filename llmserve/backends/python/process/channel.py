"""Messages between the server and a model's process: pickled, over a socket; large arrays in shared memory.

The memory of a message is an unnamed file, whose descriptor is sent with the message, so nothing is left behind if
either side dies. The receiver's arrays are views of it; it is freed with the last view.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
from contextlib import suppress
from typing import Any

SHARED_FROM_BYTES = 64 * 1024  # smaller arrays are cheaper in the message
_ALIGNMENT = 64
_HEADER = struct.Struct("<QI")  # bytes of the message, and number of arrays in shared memory


class Channel:
    def __init__(self, connection: socket.socket, *, writable: bool) -> None:
        """`writable`: whether received arrays may be changed."""
        self._socket = connection
        self._writable = writable
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send from any thread. Raises `OSError` if the other side has gone."""
        shared: list[memoryview] = []
        body = _pickled(message, shared)
        memory = None
        if shared:
            try:
                memory = _write_shared(shared)
            except OSError:  # too many open files, or no memory: send the arrays in the message
                shared, body = [], _pickled(message, None)
        header = _HEADER.pack(len(body), len(shared))
        sizes = struct.pack(f"<{len(shared)}Q", *(view.nbytes for view in shared))
        with self._sending:
            if memory is None:
                self._socket.sendall(header + body)
                return
            try:
                socket.send_fds(self._socket, [header], [memory])
            finally:
                os.close(memory)
            self._socket.sendall(sizes + body)

    def receive(self) -> Any:
        """The next message. Only one thread receives. Raises `EOFError` if the other side has gone."""
        try:
            header, files, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1, socket.MSG_WAITALL)
            if len(header) < _HEADER.size:
                raise EOFError
            body_bytes, num_shared = _HEADER.unpack(header)
            if not num_shared:
                return pickle.loads(self._read(body_bytes))
            sizes = struct.unpack(f"<{num_shared}Q", self._read(8 * num_shared))
            buffers = _map_shared(files[0], sizes, self._writable)
            return pickle.loads(self._read(body_bytes), buffers=buffers)
        except OSError as error:
            raise EOFError from error

    def shut_down(self) -> None:
        """Messages that have arrived can still be received, then the end."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut_down()
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return data


def _pickled(message: object, shared: list[memoryview] | None) -> bytes:
    """`shared` receives the large arrays; None: they stay in the message."""

    def stays_in_message(buffer: pickle.PickleBuffer) -> bool:
        if shared is None or buffer.raw().nbytes < SHARED_FROM_BYTES:
            return True
        shared.append(buffer.raw())
        return False

    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=stays_in_message).dump(message)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """For a model's own subclasses of text and numbers, such as an Enum's: the other process cannot import them."""
        kind: Any = next((plain for plain in (str, int, float) if isinstance(value, plain)), None)
        if kind is not None:
            return kind, kind.__getnewargs__(value)
        return NotImplemented


def _offsets(sizes: tuple[int, ...]) -> list[int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets


def _write_shared(views: list[memoryview]) -> int:
    """A file in memory with the contents of `views`."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("llmserve")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    try:
        for view, offset in zip(views, _offsets(tuple(view.nbytes for view in views)), strict=True):
            written = 0
            while written < view.nbytes:
                written += os.pwrite(file, view[written:], offset + written)
    except OSError:
        os.close(file)
        raise
    return file


def _map_shared(file: int, sizes: tuple[int, ...], writable: bool) -> list[memoryview]:
    try:
        offsets = _offsets(sizes)
        access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
        memory = memoryview(mmap.mmap(file, offsets[-1] + sizes[-1], access=access))
    finally:
        os.close(file)
    return [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
