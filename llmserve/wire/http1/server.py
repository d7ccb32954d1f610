"""The listening socket."""

from __future__ import annotations

import asyncio
import ssl

from llmserve.wire.http1.connection import Connection, Handler
from llmserve.wire.listener import BACKLOG, ListeningServer, claim_port
from llmserve.wire.request_memory import RequestMemory
from llmserve.wire.tls import HANDSHAKE_TIMEOUT_S


class HttpServer(ListeningServer[Connection]):
    __slots__ = ()


async def serve(
    handler: Handler,
    host: str,
    port: int,
    *,
    flag: str,
    memory: RequestMemory | None = None,
    tls: ssl.SSLContext | None = None,
    shared: bool = False,
) -> HttpServer:
    """Listen on `host:port` (0: any free port). Raises `Unavailable` if it is taken. `memory`: for all requests."""
    memory = memory or RequestMemory()
    listener = claim_port(host, port, flag, shared=shared)
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(handler, connections, memory),
        sock=listener,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
    )
    return HttpServer(listener.getsockname()[1], server, connections)
