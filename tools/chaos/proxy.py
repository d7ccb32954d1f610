"""A TCP proxy on loopback that can delay data and cut all connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tools.servers import HOST

CHUNK = 1 << 16


class Proxy:
    """Forwards to `HOST:target_port`; `delay_s` delays each piece in both directions."""

    def __init__(self, target_port: int) -> None:
        self.delay_s = 0.0
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Starts it, and returns HOST:PORT."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return f"{HOST}:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Aborts all connections at any point of their data; new ones are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._connections)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward_reader, onward = await asyncio.open_connection(HOST, self._target_port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, onward}
        self._writers |= both
        try:
            await asyncio.gather(self._pass(reader, onward), self._pass(onward_reader, writer))
        finally:
            self._writers -= both
            for each in both:
                await closed(each)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(piece)
                await writer.drain()
        with suppress(OSError):
            writer.write_eof()


async def closed(writer: asyncio.StreamWriter) -> None:
    """Closes it, in whatever state the connection is."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
