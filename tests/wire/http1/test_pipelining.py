"""How much of a body comes that nobody asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmserve.wire.http1.pipelining import MAX_UNREAD_BYTES, PipelinedRequests
from llmserve.wire.http1.request import Request


class Connection:
    def __init__(self) -> None:
        self.is_reading = True
        self.held: Callable[[], None] | None = None

    def start(self, request: Request) -> None: ...

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True
        if self.held is not None:
            self.held()


async def test_a_body_that_nobody_reads_is_not_read_from_the_client() -> None:
    connection = Connection()
    requests = PipelinedRequests(connection)
    request = Request("POST", "/x", [], keeps_alive=True, is_http10=False)
    requests.begin(request)
    requests.add(bytes(MAX_UNREAD_BYTES))
    assert connection.is_reading
    requests.add(b"x")
    assert not connection.is_reading
    connection.held = lambda: requests.add(b"y")
    await request.more_body()  # what was held comes while it begins to wait
    assert connection.is_reading
    connection.held = None
    waiting = asyncio.create_task(request.more_body())
    await asyncio.sleep(0)
    assert connection.is_reading
    requests.add(bytes(MAX_UNREAD_BYTES))  # somebody waits for it
    assert connection.is_reading
    await waiting
    requests.add(b"x")
    assert not connection.is_reading
    requests.end()  # it was there already: from here on it matters whether the client goes
    assert connection.is_reading
