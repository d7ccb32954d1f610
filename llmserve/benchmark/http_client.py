"""HTTP/1.1 for load tests: persistent connections, and the time at which each piece of a body arrived.

The time is read first, in the call in which the event loop delivers the bytes; they are parsed after that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httptools

from llmserve.errors import InvalidArgument

MAX_KEPT_BYTES = 1 << 20  # of a body that is not read in pieces: an error, a list of models
DEFAULT_PORTS = {"http": 80, "https": 443}


SETTINGS = b"\x04"  # the type of HTTP/2's first frame


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class BadAnswer(Exception):
    """The answer is not HTTP."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server, from `https://host:port/prefix`."""

    host: str
    port: int
    prefix: str  # of every path; without a slash at the end
    tls: ssl.SSLContext | None

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_server(url: str, root_certificates: Path | None) -> Server:
    """Parses HOST:PORT (without TLS) or a base URL of OpenAI's clients, which may end with /v1. Raises
    `InvalidArgument`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"--url {url}: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not host or parts.query or parts.fragment or parts.username:
        raise InvalidArgument(f"--url {url}: expected http://HOST:PORT or https://HOST:PORT")
    is_secure = parts.scheme == "https"
    if root_certificates is not None and not is_secure:
        raise InvalidArgument("--root-certificates require TLS; use an https:// URL")
    try:
        tls = ssl.create_default_context(cafile=root_certificates) if is_secure else None
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"--root-certificates {root_certificates} cannot be read: {error}") from error
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Server(host, port or DEFAULT_PORTS[parts.scheme], prefix, tls)


class Connection(asyncio.Protocol):
    """Sends one request at a time."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._lost = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._read: Callable[[float, bytes], None] | None = None
        self._start()

    def _start(self) -> None:
        self._has_begun = self._has_length = self._stays = False
        self.kept = bytearray()  # the body, unless it is read in pieces
        self._moment = 0.0
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Returns when the socket is closed, too."""
        self.abort()
        await self._lost.wait()

    async def exchange(self, request: bytes, read: Callable[[float, bytes], None]) -> int:
        """Send a request; `read` gets the time and the bytes of each piece of a body with status 200.

        Returns the status; other bodies are in `kept`. Raises `ConnectionLost` and `BadAnswer`.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("it was closed")
        self._start()
        self._read, self.is_reusable = read, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        self.is_reusable = self._stays and self.is_open
        return self._parser.get_status_code()

    # methods of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        self._moment = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            is_http2 = not self._has_begun and data[3:4] == SETTINGS
            self._end(BadAnswer("it is a gRPC port" if is_http2 else str(error)))
            self.abort()

    def eof_received(self) -> None:
        """asyncio then closes the transport."""

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()
        is_the_end = error is None and self._has_begun and not self._has_length
        self._end(None if is_the_end else ConnectionLost(str(error or "the server closed it")))

    # methods of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._has_begun = True
        self._stays = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200 and self._read is not None:
            self._read(self._moment, body)
        elif len(self.kept) < MAX_KEPT_BYTES:
            self.kept += body

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Connections:
    """A pool of connections, one for each concurrent request. The idle connection that was used last is reused."""

    def __init__(self, server: Server, connect_timeout_s: float = 30.0) -> None:
        self.server = server
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._made: set[Connection] = set()

    async def take(self) -> Connection:
        """Raises `OSError` (possibly a `TimeoutError`) if there is no server."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        server = self.server
        async with asyncio.timeout(self._connect_timeout_s):
            _, made = await asyncio.get_running_loop().create_connection(
                Connection, server.host, server.port, ssl=server.tls
            )
        self._made.add(made)
        return made

    def give_back(self, connection: Connection) -> None:
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.abort()
            self._made.discard(connection)

    async def close(self) -> None:
        """Call it when no connection is in use. Returns when the sockets are closed, too."""
        await asyncio.gather(*(connection.close() for connection in self._made))
