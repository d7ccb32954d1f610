"""Writes a file through large pages of the system's file cache.

A process that maps the file later reads it from those pages. Data written in small or unaligned pieces stays in small
pages while it is cached. The CPU engine reads its weights faster from large ones.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import BinaryIO

LARGE_PAGE_BYTES = 2 * 2**20


class LargePages:
    """Prepares pages for `file`, which is open for reading and writing and has its full length."""

    def __init__(self, file: BinaryIO) -> None:
        self._pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without large pages
                self._pages.madvise(mmap.MADV_HUGEPAGE)

    def prepare(self, offset: int, num_bytes: int) -> None:
        """Call before writing bytes [offset, offset + num_bytes): reading a hole puts it into the cache, in pages of
        the requested size."""
        first = offset - offset % LARGE_PAGE_BYTES
        _ = self._pages[first : offset + num_bytes : LARGE_PAGE_BYTES]

    def close(self) -> None:
        self._pages.close()
