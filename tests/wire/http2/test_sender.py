"""Calls that wait for windows: what opens one wakes who can use it, and nobody waits beside an open window."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from llmserve.wire.http2 import frames
from llmserve.wire.http2.sender import Sender

NUM_CALLS = 200


class Waiting:
    """A call with a thousand bytes to send, which counts how often it was woken."""

    def __init__(self, stream: int, window: int) -> None:
        self.stream, self.send_window = stream, window
        self.num_woken = 0

    @property
    def is_closed(self) -> bool:
        self.num_woken += 1
        return False


class Opened:
    """A sender without a connection, whose own window has been used up."""

    def __init__(self, window: int) -> None:
        self.sender = Sender(asyncio.get_running_loop())
        self.sender.open_window(-frames.DEFAULT_WINDOW)
        self.calls = [Waiting(2 * number + 1, window) for number in range(NUM_CALLS)]
        self.tasks = [asyncio.create_task(self.sender.send(call, b"", bytes(1000), b"")) for call in self.calls]

    @property
    def num_woken(self) -> int:
        return sum(call.num_woken for call in self.calls)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    found = Opened(1000)
    await turns()
    yield found
    await found.close()


@pytest.fixture
async def stalled() -> AsyncIterator[Opened]:
    found = Opened(0)
    await turns()
    yield found
    await found.close()


async def test_a_small_window_of_the_connection_wakes_one(opened: Opened) -> None:
    for count in range(1, 11):
        opened.sender.open_window(1)
        await turns()
        assert opened.num_woken == count


async def test_a_window_of_the_connection_wakes_nobody_who_could_not_use_it(stalled: Opened) -> None:
    stalled.sender.open_window(10**6)
    await turns()
    assert stalled.num_woken == 0
    stalled.calls[7].send_window += 1000
    stalled.sender.wake(stalled.calls[7].stream)
    await turns()
    assert stalled.num_woken == stalled.calls[7].num_woken == 1
    assert [task.done() for task in stalled.tasks].index(True) == 7


async def test_what_one_leaves_is_the_next_ones(opened: Opened) -> None:
    opened.sender.open_window(3000)
    await turns(2 * NUM_CALLS)
    assert sum(task.done() for task in opened.tasks) == 3


async def test_the_turn_of_a_call_that_ends_is_the_next_ones(opened: Opened) -> None:
    opened.sender.open_window(1000)
    opened.tasks[0].cancel()  # it has been woken, and has not run
    await turns(10)
    assert [task.done() for task in opened.tasks[:3]] == [True, True, False]


@pytest.mark.parametrize("seed", range(5))
async def test_all_is_sent_however_windows_open(seed: int, stalled: Opened) -> None:
    chance = random.Random(seed)
    sender, calls = stalled.sender, stalled.calls
    owed = {call.stream: 1000 for call in calls}
    left = 1000 * NUM_CALLS
    while left or any(owed.values()):
        match chance.randrange(5):
            case 0 if left:
                left -= (more := min(left, chance.randrange(1, 3000)))
                sender.open_window(more)
            case 1:
                sender.is_paused = True
            case 2:
                sender.resume()
            case _:
                call = chance.choice(calls)
                more = min(owed[call.stream], chance.randrange(1, 1001))
                owed[call.stream] -= more
                call.send_window += more
                sender.wake(call.stream)
        await turns(chance.randrange(3))
    sender.resume()
    async with asyncio.timeout(30):
        await asyncio.gather(*stalled.tasks)
