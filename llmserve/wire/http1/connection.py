"""One connection: requests are answered one at a time, in their order.

Limits apply to the size of a request's headers and trailers, to the time for headers, to idle time, and to the time
that a connection keeps the event loop busy at once. Without them, a client could hold a connection for ever by never
ending its headers, and fill the memory with endless ones. Bodies are limited where they are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from llmserve.wire.http1.answers import JOINED_BYTES, Answer, Body, Reply, refusal
from llmserve.wire.http1.deadlines import Deadlines
from llmserve.wire.http1.parser import BadRequest, RequestParser
from llmserve.wire.http1.pipelining import PipelinedRequests
from llmserve.wire.http1.request import ClientGone, Request
from llmserve.wire.incoming import Incoming
from llmserve.wire.request_memory import RequestMemory

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Handler = Callable[[Request], Awaitable[Answer]]
logger = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, connections: set[Connection], memory: RequestMemory) -> None:
        """`connections` contains this one while it is open; `memory` is shared by all requests."""
        self.closed = asyncio.Event()
        self._handler = handler
        self._connections = connections
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._requests = PipelinedRequests(self)
        self._parser = RequestParser(self._requests)
        self._incoming = Incoming(self._parse)
        self._deadlines = Deadlines(self)
        self._outgoing: list[Body] = []
        self._num_outgoing = 0  # bytes
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._task: asyncio.Task[None] | None = None  # answers the running request
        self._reply: Reply | None = None  # its answer
        self._is_leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a TCP transport, of any event loop
        self._incoming.transport = self._transport
        self._connections.add(self)
        self._deadlines.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        self._incoming.drop()
        self._deadlines.stop()
        self._requests.forget_waiting()
        self._can_write.set()
        if self._requests.running is not None:
            self._requests.running.client_is_gone()
        self.closed.set()

    def pause_writing(self) -> None:
        self._can_write.clear()
        self._deadlines.reading_stopped()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._deadlines.reading_goes_on()

    def data_received(self, data: bytes) -> None:
        if self._is_open():
            self._incoming.take(data)

    def leave(self) -> None:
        """Serve no further request."""
        self._is_leaving = True
        if self._requests.running is None:
            self.close()
        else:
            self._requests.running.keeps_alive = False

    def abort(self) -> None:
        """End the running request and close, whether or not the client reads."""
        if self._task is not None:
            self._task.cancel()
        if self.is_serving and (self._reply is None or not self._reply.has_begun):
            self.write(refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down"))
        self._flush()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send what was written, read nothing more, and close."""
        self._flush()
        self._incoming.drop()
        self._requests.forget_waiting()
        if self._transport is not None:
            self._transport.close()

    def refuse(self, status: HTTPStatus, problem: str) -> None:
        """Close; send an error response first if the client cannot mistake it for a part of another answer."""
        has_begun = self._reply is not None and self._reply.has_begun
        is_answered = self._parser.is_in_body and not self.is_serving
        if not has_begun and not is_answered:
            self.write(refusal(status, problem))
        self.close()

    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _parse(self, data: bytes | memoryview) -> None:
        try:
            self._parser.feed(data)
        except BadRequest as error:
            self.refuse(error.status, error.problem)
            return
        if self._parser.holds_end or not self._parser.is_in_headers:
            self._deadlines.headers_ended()  # those that had begun before this slice
        if self._parser.is_in_headers:
            self._deadlines.headers_pending()

    # for its deadlines

    @property
    def is_serving(self) -> bool:
        return self._requests.running is not None

    @property
    def is_in_headers(self) -> bool:
        return self._parser.is_in_headers

    @property
    def num_unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def cut_off(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # for its requests

    def start(self, request: Request) -> None:
        if (request.header(b"expect") or "").lower() == "100-continue":
            request.before_waiting(lambda: self.write(CONTINUE))
        request.memory, request.share = self._memory, self._memory.share()
        self._task = self._loop.create_task(self._serve(request))

    def pause_reading(self) -> None:
        self._incoming.hold()

    def resume_reading(self) -> None:
        self._incoming.release()

    # for answers

    def write(self, data: Body) -> None:
        """Send data. Small writes of one turn of the event loop are sent in one piece."""
        if self._transport is None:
            return
        if len(data) > JOINED_BYTES:
            self._flush()
            self._transport.write(data)
            return
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(data)
        self._num_outgoing += len(data)
        if self._num_outgoing > JOINED_BYTES:
            self._flush()  # may call `pause_writing`

    async def writable(self) -> None:
        if not self._can_write.is_set():
            await self._can_write.wait()

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
        self._num_outgoing = 0

    async def _serve(self, request: Request) -> None:
        reply: Reply | None = None
        try:
            answer = await self._handler(request)
            reply = self._reply = Reply(request, self)
            await answer.send(reply)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if self._transport is not None:
                raise  # cancelled by the server, not by the client
        except Exception:
            logger.exception("a request could not be answered")
        finally:
            self._served(request, is_answered=reply is not None and reply.is_complete)

    def _served(self, request: Request, *, is_answered: bool) -> None:
        self._task = self._reply = None
        request.share.release()  # not run for a task cancelled before it began, whose share is empty
        self._requests.finish()
        self._deadlines.served()
        if not is_answered or not request.keeps_alive or self._is_leaving:
            self.close()
        elif self._is_open():
            self._requests.start_next()
