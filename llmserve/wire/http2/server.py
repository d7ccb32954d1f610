"""The listening socket."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

from llmserve.wire.http2.connection import NO_LIMITS, Connection
from llmserve.wire.http2.keepalive import ConnectionLimits
from llmserve.wire.http2.method import Method
from llmserve.wire.listener import BACKLOG, ListeningServer, claim_port
from llmserve.wire.request_memory import RequestMemory
from llmserve.wire.tls import HANDSHAKE_TIMEOUT_S


class Http2Server(ListeningServer[Connection]):
    __slots__ = ()

    def peers(self) -> set[str]:
        """Addresses of the connected clients."""
        return {connection.peer for connection in self._connections}


async def serve(
    methods: Mapping[str, Method],
    host: str,
    port: int,
    *,
    limits: ConnectionLimits = NO_LIMITS,
    tls: ssl.SSLContext | None = None,
    memory: RequestMemory | None = None,
    shared: bool = False,
) -> Http2Server:
    """Listen on `host:port` (0: any free port). Raises `Unavailable` if it is taken. `memory`: for all requests."""
    memory = memory or RequestMemory()
    listener = claim_port(host, port, "--grpc-port", shared=shared)
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(methods, connections, memory, limits),
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
    )
    return Http2Server(listener.getsockname()[1], server, connections)
