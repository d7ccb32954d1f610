"""Messages of one call, put together from what comes."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from llmserve.wire.http2.messages import Assembler, BadMessage, Compressed
from llmserve.wire.inflation import PIECE_BYTES
from llmserve.wire.request_memory import RequestMemory

GZIP = 31


def gzipped(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=GZIP)
    return compressor.compress(data) + compressor.flush()


def only_message(content: bytes, encoding: str = "gzip") -> Compressed:
    (message,) = Assembler(encoding).feed(b"\x01" + len(content).to_bytes(4, "big") + content)
    assert isinstance(message, Compressed)
    return message


async def plain(content: bytes) -> bytes:
    memory = RequestMemory()
    return bytes(await only_message(content).plain(memory, memory.share()))


@pytest.mark.parametrize(
    ("size", "in_thread"), [(0, False), (1000, False), (PIECE_BYTES, False), (PIECE_BYTES + 1, True), (10**7, True)]
)
async def test_what_inflates_to_much_does_so_beside_the_event_loop(
    size: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    work_of = RequestMemory.work

    async def noting(self: RequestMemory, *work: Any) -> Any:
        threads.append(work)
        return await work_of(self, *work)

    monkeypatch.setattr(RequestMemory, "work", noting)
    assert await plain(gzipped(bytes(size))) == bytes(size)
    assert bool(threads) == in_thread


@pytest.mark.parametrize("size", [1000, 10**6])
async def test_a_compressed_message_that_is_cut_off(size: int) -> None:
    with pytest.raises(BadMessage, match="truncated"):
        await plain(gzipped(bytes(size))[:-9])


async def test_what_follows_compressed_data_is_not_kept() -> None:
    """It would be copied again for each piece of it."""
    message = only_message(gzipped(b"x") + bytes(4 * PIECE_BYTES))
    memory = RequestMemory()
    assert await message.plain(memory, memory.share()) == b"x"
    assert len(message._inflater.unused_data) < PIECE_BYTES


async def test_a_message_that_inflates_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.wire.http2.messages.MAX_MESSAGE_BYTES", 10**6)
    with pytest.raises(BadMessage, match="too large"):
        await plain(gzipped(bytes(10**7)))
