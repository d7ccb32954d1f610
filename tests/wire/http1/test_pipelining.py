"""How much of a body comes that nobody asks for."""

from __future__ import annotations

import asyncio

from llmserve.wire.http1.pipelining import MAX_WAITING_BYTES, PipelinedRequests
from llmserve.wire.http1.request import Request


class Connection:
    def __init__(self) -> None:
        self.is_reading = True

    def start(self, request: Request) -> None: ...

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


async def test_a_body_that_nobody_reads_is_not_read_from_the_client() -> None:
    connection = Connection()
    requests = PipelinedRequests(connection)
    request = Request("POST", "/x", [], keeps_alive=True, is_http10=False)
    requests.begin(request)
    requests.add(bytes(MAX_WAITING_BYTES))
    assert connection.is_reading
    requests.add(b"x")
    assert not connection.is_reading
    waiting = asyncio.create_task(request.more_body())
    await asyncio.sleep(0)
    assert connection.is_reading
    requests.add(bytes(MAX_WAITING_BYTES))  # somebody waits for it
    assert connection.is_reading
    await waiting
    requests.add(b"x")
    assert not connection.is_reading
    requests.finish()
    requests.start_next()
    assert connection.is_reading
