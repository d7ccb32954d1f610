"""However many calls start, end or expire at the same moment, the event loop is busy with a few of them at a time."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from llmserve.wire.http2 import calls, frames
from llmserve.wire.http2.call import Call
from llmserve.wire.http2.frames import frame
from llmserve.wire.turns import MAX_BEGUN
from tests.frontends.server import RunningServer, wait_until
from tests.wire.http2.raw_client import RawClient

NUM_CALLS = 3000
LONGEST_TURN_S = 0.05  # of the processor, as the loop's thread has it


@contextmanager
def timed_turns(loop: asyncio.AbstractEventLoop) -> Iterator[list[float]]:
    """Processor time of each turn of a running loop: a busy machine changes nothing."""
    untimed: Any = loop
    run_once, turns = untimed._run_once, [0.0]

    def timed() -> None:
        began = time.thread_time()
        run_once()
        turns.append(time.thread_time() - began)

    untimed._run_once = timed
    gc.disable()  # whose pauses are those of everything that the tests keep
    try:
        yield turns
    finally:
        gc.enable()
        untimed._run_once = run_once


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """What happened to calls in each turn."""
    turns: Counter[int] = Counter()
    for name in ("_run_soon", "_cancel", "_expire"):
        act = getattr(calls.Calls, name)

        def counted(self: calls.Calls, of: Any, act: Callable[..., None] = act) -> None:
            turns[self._pace._turns.number] += 1
            act(self, of)

        monkeypatch.setattr(calls.Calls, name, counted)
    return turns


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    found: list[Call] = []
    forget = Call.forget

    def noted(call: Call) -> None:
        found.append(call)
        forget(call)

    monkeypatch.setattr(Call, "forget", noted)
    return found


def opened(client: RawClient, **more: str) -> list[bytes]:
    first, other = (client.headers("ModelStreamInfer", **more) for _ in range(2))  # the first fills the table
    blocks = [first] + [other] * (NUM_CALLS - 1)
    return [frame(frames.HEADERS, frames.END_HEADERS, 2 * n + 1, block) for n, block in enumerate(blocks)]


def expire(clients: list[RawClient]) -> None:
    for client in clients:
        client.send(b"".join(opened(client, grpc_timeout="1n")))


def reset(clients: list[RawClient]) -> None:
    for client in clients:
        pieces = [head + frames.reset(2 * number + 1, 8) for number, head in enumerate(opened(client))]
        client.send(b"".join(pieces))


def leave(clients: list[RawClient]) -> None:
    for client in clients:
        client.send(b"".join(opened(client)) + frame(frames.PING, 0, 0, bytes(8)))
        client.until(frames.PING)
    for client in clients:
        client.socket.close()


@pytest.mark.parametrize("attack", [expire, reset, leave])
def test_no_turn_is_long(
    server: RunningServer, begun: Counter[int], ended: list[Call], attack: Callable[[list[RawClient]], None]
) -> None:
    with ExitStack() as stack:
        clients = [RawClient(server.grpc_port) for _ in range(2)]
        for client in clients:
            stack.enter_context(closing(client.socket))
        turns = stack.enter_context(timed_turns(server.loop))
        attack(clients)
        wait_until(lambda: len(ended) == len(clients) * NUM_CALLS, timeout_s=20)
    assert max(begun.values()) <= MAX_BEGUN
    print(f"longest turn: {max(turns) * 1e3:.0f} ms")
    assert max(turns) < LONGEST_TURN_S
