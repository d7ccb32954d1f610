"""One connection: requests are answered one at a time, in their order.

Bounded are the headers of a request, their size and the time that they may take, and how long a connection may be idle.
Without that a client holds one for ever by never ending its headers, and fills the memory with endless ones. Bodies
have their bounds where they are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from llmserve.wire.http1.answers import JOINED_BYTES, Answer, Reply, refusal
from llmserve.wire.http1.request import ClientGone, Request

MAX_HEADER_BYTES = 64 * 1024  # request line included
HEADERS_TIMEOUT_S = 60
KEEP_ALIVE_S = 75  # idle connections of pooling clients
MAX_WAITING = 16  # requests behind the one that is answered
MAX_WAITING_BYTES = 64 * 1024  # of the body of such a request
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

Handler = Callable[[Request], Awaitable[Answer]]
logger = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        """`connections` holds this one for as long as it lives."""
        self.closed = asyncio.Event()
        self._handler = handler
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser = self._make_parser()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._num_outgoing = 0  # bytes
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._task: asyncio.Task[None] | None = None  # answers `_running`
        self._running: Request | None = None
        self._waiting: deque[Request] = deque()
        self._arriving: Request | None = None  # its body may still be on its way, and is of use
        self._reply: Reply | None = None  # to `_running`
        self._is_leaving = False
        self._in_headers = False
        self._holds_end = False  # what is being parsed has the end of a request in it
        self._num_header_bytes = 0
        self._url = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._idle_until = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a TCP transport, whoever implements it
        self._connections.add(self)
        self._idle_until = self._loop.time() + HEADERS_TIMEOUT_S
        self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        self._stop_headers_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._waiting.clear()
        self._can_write.set()
        if self._running is not None:
            self._running.client_is_gone()
        self.closed.set()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def data_received(self, data: bytes) -> None:
        self._holds_end = False
        while data and self._is_open():
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as upgrade:
                data = self._without_offer(data[upgrade.args[0] :])
            except HttpParserError as error:
                logger.debug("no HTTP: %r", error)
                self._refuse(HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.")
        if self._in_headers and self._is_open():
            self._wait_for_headers(0 if self._holds_end else len(data))  # how much is a request's before is unknown

    def leave(self) -> None:
        """Serve no further request."""
        self._is_leaving = True
        if self._running is None:
            self._close()
        else:
            self._running.keeps_alive = False

    def abort(self) -> None:
        """End what runs and close, whether the client reads or not."""
        if self._task is not None:
            self._task.cancel()
        if self._running is not None and (self._reply is None or not self._reply.has_begun):
            self.write(refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down"))
        self._flush()
        if self._transport is not None:
            self._transport.abort()

    # of answers

    def write(self, data: bytes) -> None:
        """What is written in one turn of the event loop goes out in one piece, but for what is large."""
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
            self._flush()  # which may pause us

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
        self._num_outgoing = 0

    async def writable(self) -> None:
        if not self._can_write.is_set():
            await self._can_write.wait()

    # what the parser finds

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._num_header_bytes = 0
        self._url = b""
        self._fields = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # not behind a body
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_headers_timer()
        if self._parser.should_upgrade():
            self._arriving = None
            return  # see _without_offer
        is_http10 = self._parser.get_http_version() == "1.0"
        request = self._arriving = Request(
            self._parser.get_method().decode("ascii"),
            _path(self._url),
            self._fields,
            keeps_alive=not is_http10 and self._parser.should_keep_alive(),
            is_http10=is_http10,
        )
        if (request.header(b"expect") or "").lower() == "100-continue":
            request.before_waiting(lambda: self.write(CONTINUE))
        if self._running is None:
            self._start(request)
        else:
            self._waiting.append(request)
            if len(self._waiting) >= MAX_WAITING:
                self._pause_reading()

    def on_body(self, data: bytes) -> None:
        if self._arriving is None:
            return
        self._arriving.add(data)
        if self._arriving is not self._running and self._arriving.num_bytes > MAX_WAITING_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._holds_end = True
        if self._arriving is not None:
            self._arriving.end()

    def _make_parser(self) -> HttpRequestParser:
        parser = HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # which is not served, but no error
        return parser

    def _without_offer(self, rest: bytes) -> bytes:
        """A request again that offers another protocol, without the offer, which is not taken; and what follows it.

        The parser has left it at the end of the headers, and takes its body for the other protocol's.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(HTTPStatus.BAD_REQUEST, "This server is no proxy.")
            return b""
        lines = [b"%b: %b\r\n" % field for field in self._fields if field[0] != b"upgrade"]
        version = self._parser.get_http_version().encode()
        self._parser = self._make_parser()
        return b"%b %b HTTP/%b\r\n%b\r\n%b" % (method, self._url, version, b"".join(lines), rest)

    # one request after the other

    def _start(self, request: Request) -> None:
        if self._is_open():
            self._running = request
            self._task = self._loop.create_task(self._serve(request))

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
                raise  # not by the client
        except Exception:
            logger.exception("a request could not be answered")
        finally:
            self._served(request, is_answered=reply is not None and reply.is_complete)

    def _served(self, request: Request, *, is_answered: bool) -> None:
        self._running = self._task = self._reply = None
        if self._arriving is request:
            self._arriving = None  # what is left of its body is of no use
        self._idle_until = self._loop.time() + KEEP_ALIVE_S
        if not is_answered or not request.keeps_alive or self._is_leaving:
            self._close()
        elif self._waiting:
            self._start(self._waiting.popleft())
        if not self._waiting:
            self._resume_reading()

    def _pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._transport.resume_reading()

    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _close(self) -> None:
        """Nothing more is read; what has been written is sent."""
        self._flush()
        self._waiting.clear()
        if self._transport is not None:
            self._transport.close()

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        self._in_headers = False
        self.write(refusal(status, problem))
        self._close()

    # deadlines

    def _wait_for_headers(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES:
            problem = f"request headers exceed {MAX_HEADER_BYTES} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, problem)
        elif self._headers_timer is None:
            self._headers_timer = self._loop.call_later(HEADERS_TIMEOUT_S, self._end_headers)

    def _stop_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _end_headers(self) -> None:
        self._headers_timer = None
        if self._running is not None:  # reading is paused, or the answer before may still be sent
            self._wait_for_headers(0)
        else:
            problem = f"request headers took more than {HEADERS_TIMEOUT_S} seconds"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, problem)

    def _check_idle(self) -> None:
        """One timer for the life of a connection, since a timer for each request costs more than looking again."""
        if self._running is not None or self._in_headers:
            self._idle_timer = self._loop.call_later(KEEP_ALIVE_S, self._check_idle)
        elif self._loop.time() < self._idle_until:
            self._idle_timer = self._loop.call_at(self._idle_until, self._check_idle)
        else:
            self._close()


def _path(url: bytes) -> str:
    """Raises what the parser turns into an error of its own when `url` is none."""
    plain = url if url.startswith(b"/") and b"?" not in url and b"#" not in url else parse_url(url).path or b"/"
    path = plain.decode("ascii")
    return unquote(path) if "%" in path else path
