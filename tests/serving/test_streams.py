"""Streams that are filled from outside, and the way from other threads to the loop."""

from __future__ import annotations

import asyncio
import threading

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


async def test_outbox_keeps_the_order_and_wakes_the_loop_once_for_many() -> None:
    loop = asyncio.get_running_loop()
    outbox = Outbox(loop)
    seen: list[int] = []
    wakes = []
    schedule = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *args: (wakes.append(1), schedule(*args))[1]  # type: ignore[method-assign]
    try:
        thread = threading.Thread(target=lambda: [outbox.put(lambda i=i: seen.append(i)) for i in range(1000)])  # type: ignore[misc]
        thread.start()
        thread.join()
        await asyncio.sleep(0.01)
    finally:
        loop.call_soon_threadsafe = schedule  # type: ignore[method-assign]
    assert seen == list(range(1000))
    assert len(wakes) == 1


def test_outbox_of_a_closed_loop_drops() -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(loop)
    loop.close()
    outbox.put(lambda: None)


async def _names(stream: ResponseStream) -> list[str]:
    return [item.request_id async for item in stream]
