"""A file that is written in odd pieces lies in large pages, where the system can do that."""

from __future__ import annotations

import mmap
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import pytest

from llmserve.builder.targets.cpu.large_pages import LARGE_PAGE_BYTES, LargePages
from tests.engine.cpu.mappings import mapping_of

FILE_BYTES = 4 * LARGE_PAGE_BYTES
PIECE_BYTES = 5 * 2**18 + 3


def bytes_in_large_pages(file: BinaryIO, path: Path) -> int:
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        _ = pages[::4096]
        found = re.search(r"FilePmdMapped: +(\d+) kB", mapping_of(path))
        return 1024 * int(found[1]) if found else 0


def system_keeps_files_in_large_pages(path: Path) -> bool:
    with path.open("wb+") as file:
        file.truncate(FILE_BYTES)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            try:
                pages.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))
            except OSError:
                return False
            _ = pages[::LARGE_PAGE_BYTES]
        return bytes_in_large_pages(file, path) == FILE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_odd_pieces_lie_in_large_pages(tmp_path: Path) -> None:
    if not system_keeps_files_in_large_pages(tmp_path / "probe"):
        pytest.skip("this file system or kernel has no large pages for files")
    path = tmp_path / "file"
    with path.open("wb+") as file:
        file.truncate(FILE_BYTES)
        with closing(LargePages(file)) as pages:
            for offset in range(4096, FILE_BYTES - PIECE_BYTES, PIECE_BYTES):
                pages.prepare(offset, PIECE_BYTES)
                file.seek(offset)
                file.write(bytes([offset % 255 + 1]) * PIECE_BYTES)
        file.flush()
        assert bytes_in_large_pages(file, path) >= FILE_BYTES - LARGE_PAGE_BYTES
