"""Streams that are filled from outside, and the way from other threads to the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest

from llmserve.serving.streams import Outbox, ResponseStream
from llmserve.serving.types import InferResponse


def response(name: str, *, final: bool = False) -> InferResponse:
    return InferResponse("m", "1", name, final=final)


async def test_yields_what_is_pushed_before_and_after_the_pull() -> None:
    stream = ResponseStream()
    stream.push(response("a"))
    reader = asyncio.create_task(_names(stream))
    await asyncio.sleep(0)
    stream.push(response("b"))
    stream.push(response("c", final=True))
    assert await reader == ["a", "b", "c"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_close_before_the_first_pull_is_noticed() -> None:
    stream = ResponseStream()
    stream.push(response("a"))
    await stream.aclose()
    assert stream.closed
    stream.push(response("b"))
    assert await _names(stream) == []


async def test_close_ends_a_waiting_reader() -> None:
    stream = ResponseStream()
    reader = asyncio.create_task(_names(stream))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reader == []


async def test_cancelled_reader_may_be_followed_by_another() -> None:
    stream = ResponseStream()
    reader = asyncio.create_task(_names(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    stream.push(response("a", final=True))
    assert await _names(stream) == ["a"]


async def test_throw_closes() -> None:
    stream = ResponseStream()
    with pytest.raises(KeyError):
        await stream.athrow(KeyError)
    assert stream.closed


async def test_outbox_keeps_the_order_and_wakes_the_loop_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox(loop)
    seen: list[int] = []
    wakes = []
    schedule = loop.call_soon_threadsafe

    def noting(*args: Any) -> asyncio.Handle:
        wakes.append(1)
        return schedule(*args)

    def put_many() -> None:
        for number in range(1000):
            outbox.put(partial(seen.append, number))

    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", noting)
        thread = threading.Thread(target=put_many)
        thread.start()
        thread.join()
        await asyncio.sleep(0.01)
    assert seen == list(range(1000))
    assert len(wakes) == 1


async def test_what_is_put_together_arrives_together() -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox(loop)
    turns: list[int] = []
    turn = 0

    def put_three() -> None:
        with outbox:
            for _ in range(3):
                outbox.put(lambda: turns.append(turn))
                time.sleep(0.005)  # the loop would have come meanwhile
        outbox.put(lambda: turns.append(turn))

    thread = threading.Thread(target=put_three)
    thread.start()
    while len(turns) < 4:
        turn += 1
        await asyncio.sleep(0.001)
    assert turns[0] > 1
    assert turns[0] == turns[1] == turns[2]


async def test_a_reader_that_sleeps_already_is_woken_with_the_first_response() -> None:
    stream = ResponseStream()
    reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stream.wake_first(reader)
    assert not reader.done()
    stream.push(response("a"))
    assert reader.done()
    assert (await anext(stream)).request_id == "a"


@pytest.mark.parametrize("close_first", [False, True])
async def test_a_reader_that_sleeps_already_is_woken_by_the_end(close_first: bool) -> None:
    stream = ResponseStream()
    reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if close_first:
        await stream.aclose()
    stream.wake_first(reader)
    await stream.aclose()
    assert reader.done()


def test_outbox_of_a_closed_loop_drops() -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(loop)
    loop.close()
    outbox.put(lambda: None)


async def _names(stream: ResponseStream) -> list[str]:
    return [item.request_id async for item in stream]
