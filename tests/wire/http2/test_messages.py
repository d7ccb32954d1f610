"""Messages of one call, put together from what comes."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import pytest

from llmserve.wire.http2.messages import INLINE_BYTES, Assembler, BadMessage, Compressed

GZIP = 31


def gzipped(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=GZIP)
    return compressor.compress(data) + compressor.flush()


def only_message(content: bytes, encoding: str = "gzip") -> Compressed:
    (message,) = Assembler(encoding).feed(b"\x01" + len(content).to_bytes(4, "big") + content)
    assert isinstance(message, Compressed)
    return message


@pytest.mark.parametrize(
    ("size", "in_thread"), [(0, False), (1000, False), (INLINE_BYTES, False), (INLINE_BYTES + 1, True), (10**7, True)]
)
async def test_what_inflates_to_much_does_so_beside_the_event_loop(
    size: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    to_thread = asyncio.to_thread

    def noting(*work: Any) -> Any:
        threads.append(work)
        return to_thread(*work)

    monkeypatch.setattr(asyncio, "to_thread", noting)
    assert await only_message(gzipped(bytes(size))).plain() == bytes(size)
    assert bool(threads) == in_thread


@pytest.mark.parametrize("size", [1000, 10**6])
async def test_a_compressed_message_that_is_cut_off(size: int) -> None:
    with pytest.raises(BadMessage, match="cut off"):
        await only_message(gzipped(bytes(size))[:-9]).plain()


async def test_a_message_that_inflates_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.wire.http2.messages.MAX_MESSAGE_BYTES", 10**6)
    with pytest.raises(BadMessage, match="too large"):
        await only_message(gzipped(bytes(10**7))).plain()
