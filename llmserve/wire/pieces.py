"""Bytes that arrive in many pieces, and are joined only when all have arrived.

A growing buffer is copied again and again, and each copy is one call that holds the GIL. So the bytes are kept in
blocks that the operating system allocates. Freed blocks are available to all processes at once, while Python's
allocator would keep as much again.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

CRUMB_BYTES = 64 * 1024  # this many bytes are kept without a block
BLOCK_BYTES = 1024 * 1024
BLOCKS_AT_ONCE = 32  # freed at once: each takes the system about 0.08 ms


def in_pieces(data: bytes | memoryview, size: int = BLOCK_BYTES) -> Iterator[bytes | memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def copied(data: bytes | memoryview) -> bytes:
    """`bytes(data)`, but without holding the GIL all the time: joining large parts releases it."""
    return bytes(data) if len(data) <= BLOCK_BYTES else b"".join(map(bytes, in_pieces(data)))


class Pieces:
    __slots__ = ("_at", "_blocks", "_crumbs", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self._blocks: deque[memoryview] = deque()
        self._at = BLOCK_BYTES  # where the free space of the last block begins
        self._crumbs = bytearray()  # the bytes after the blocks

    def __len__(self) -> int:
        return self.num_bytes

    def __del__(self) -> None:
        """Free the blocks of a message that nobody took; other work of the event loop runs in between."""
        if len(self._blocks) > BLOCKS_AT_ONCE:
            with suppress(RuntimeError):  # no event loop runs here that would be blocked
                loop = asyncio.get_running_loop()
                loop.call_soon(_give_back, self._blocks, loop)

    def add(self, data: bytes | bytearray) -> None:
        self.num_bytes += len(data)
        if len(self._crumbs) + len(data) <= CRUMB_BYTES:
            self._crumbs += data
            return
        self._append(self._crumbs)
        self._crumbs = bytearray()
        self._append(data)

    def small(self) -> bytes:
        """All bytes, in one call; for small messages."""
        return self._joined().tobytes()

    def taken(self) -> memoryview:
        """Returns and removes all bytes. Call it in a thread if there are many."""
        return self._joined().toreadonly()

    def _joined(self) -> memoryview:
        if not self._blocks:
            return memoryview(self._crumbs)
        self._append(self._crumbs)
        whole = memoryview(mmap.mmap(-1, self.num_bytes))
        at = 0
        while self._blocks:
            block = self._blocks.popleft()
            size = BLOCK_BYTES if self._blocks else self._at
            whole[at : at + size] = block[:size]
            at += size
        return whole

    def _append(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            if self._at == BLOCK_BYTES:
                self._blocks.append(memoryview(mmap.mmap(-1, BLOCK_BYTES)))
                self._at = 0
            size = min(len(view), BLOCK_BYTES - self._at)
            self._blocks[-1][self._at : self._at + size] = view[:size]
            self._at += size
            view = view[size:]


def _give_back(blocks: deque[memoryview], loop: asyncio.AbstractEventLoop) -> None:
    for _ in range(min(BLOCKS_AT_ONCE, len(blocks))):
        blocks.popleft()
    if blocks:
        loop.call_soon(_give_back, blocks, loop)
