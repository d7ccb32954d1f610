"""Large pages for a file that is being written, in the system's file cache.

Whoever maps the file later reads it from those pages. What is written in small or odd pieces lies in small pages, and
stays there as long as it is cached; through large ones the CPU engine reads its weights faster.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import BinaryIO

LARGE_PAGE_BYTES = 2 * 2**20


class LargePages:
    """Of `file`, which is open for reading and writing and has its full length."""

    def __init__(self, file: BinaryIO) -> None:
        self._pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without large pages
                self._pages.madvise(mmap.MADV_HUGEPAGE)

    def prepare(self, offset: int, num_bytes: int) -> None:
        """Before bytes [offset, offset + num_bytes) are written: looking at a hole puts it into the cache, in pages as
        large as were asked for."""
        first = offset - offset % LARGE_PAGE_BYTES
        _ = self._pages[first : offset + num_bytes : LARGE_PAGE_BYTES]

    def close(self) -> None:
        self._pages.close()
