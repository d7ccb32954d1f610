"""No connection keeps the event loop for long, whatever it sends."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from llmserve.wire.incoming import SLICE_BYTES, TURN_S, Incoming
from llmserve.wire.turns import ALL_TURN_S


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True


async def test_others_have_their_turn_while_much_is_parsed() -> None:
    parsed: list[int] = []

    def parse(data: bytes | memoryview) -> None:
        time.sleep(TURN_S)
        parsed.append(len(data))

    incoming = Incoming(parse)
    incoming.transport = transport = Transport()
    for _ in range(3):  # reads of one turn
        incoming.take(bytes(8 * SLICE_BYTES))
    assert len(parsed) == 1
    turns = 0
    while len(parsed) < 24:
        assert not transport.reads
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 20
    assert transport.reads
    assert parsed == [SLICE_BYTES] * 24


async def test_what_is_small_is_parsed_at_once_and_whole() -> None:
    parsed: list[bytes | memoryview] = []
    incoming = Incoming(parsed.append)
    incoming.take(b"x" * SLICE_BYTES)
    assert parsed == [b"x" * SLICE_BYTES]


async def test_what_is_dropped_is_not_parsed_and_reading_goes_on() -> None:
    def parse(data: bytes | memoryview) -> None:
        incoming.drop()
        parsed.append(len(data))

    parsed: list[int] = []
    incoming = Incoming(parse)
    incoming.transport = transport = Transport()
    incoming.hold()
    assert not transport.reads
    incoming.take(bytes(3 * SLICE_BYTES))
    assert parsed == []
    incoming.release()
    await asyncio.sleep(0.01)
    assert parsed == [SLICE_BYTES]
    assert transport.reads


@given(
    st.lists(st.integers(1, 5 * SLICE_BYTES), max_size=8), st.lists(st.sampled_from(("hold", "release")), max_size=8)
)
def test_everything_arrives_in_order(sizes: list[int], acts: list[str]) -> None:
    async def run() -> None:
        got = bytearray()
        incoming = Incoming(got.extend)
        incoming.transport = transport = Transport()
        sent = b""
        for at, size in enumerate(sizes):
            piece = random.Random(size).randbytes(size)
            sent += piece
            incoming.take(piece)
            if at < len(acts):
                getattr(incoming, acts[at])()
        incoming.release()
        for _ in range(100):
            await asyncio.sleep(0)
        assert bytes(got) == sent
        assert transport.reads

    asyncio.run(run())


async def test_all_connections_together_leave_turns_to_others_and_none_waits_for_ever() -> None:
    num_connections, parsed = 40, [0] * 40

    def parser(number: int) -> Callable[[bytes | memoryview], None]:
        def parse(data: bytes | memoryview) -> None:
            time.sleep(TURN_S)
            parsed[number] += 1

        return parse

    everybody = [Incoming(parser(number)) for number in range(num_connections)]
    for incoming in everybody:
        incoming.transport = Transport()
        incoming.take(bytes(4 * SLICE_BYTES))
    most = round(ALL_TURN_S / TURN_S) + 1
    assert sum(parsed) <= most
    turns = 0
    while sum(parsed) < 4 * num_connections:
        before = sum(parsed)
        await asyncio.sleep(0)
        turns += 1
        assert sum(parsed) - before <= most
        assert max(parsed) - min(parsed) <= 2
        assert turns < 500
    assert parsed == [4] * num_connections
