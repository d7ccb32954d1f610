"""The listening socket."""

from __future__ import annotations

import asyncio

from llmserve.wire.http1.connection import Connection, Handler
from llmserve.wire.listener import BACKLOG, ListeningServer, claim_port
from llmserve.wire.request_memory import RequestMemory


class HttpServer(ListeningServer[Connection]):
    __slots__ = ()


async def serve(
    handler: Handler, host: str, port: int, *, flag: str, memory: RequestMemory | None = None
) -> HttpServer:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken. `memory`: of all requests."""
    memory = memory or RequestMemory()
    listener = claim_port(host, port, flag)
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(handler, connections, memory), sock=listener, backlog=BACKLOG)
    return HttpServer(listener.getsockname()[1], server, connections)
