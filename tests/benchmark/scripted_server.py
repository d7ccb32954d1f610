"""A slow server of /v1 that answers as it is told, and notes when: what a client measures can be compared with it."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
EVENT_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Script:
    """Of one answer."""

    first_s: float = 0.0
    gap_s: float = 0.0
    count: int = 3  # of pieces
    tokens_per_piece: int = 1
    status: int = 200
    message: str = ""  # of an error; with status 200 it is one in the stream, behind the pieces
    dies: bool = False  # the connection ends behind the pieces
    counts: bool = True  # says how many tokens there were
    raw: bytes | None = None  # instead of everything else


@dataclass
class Served:
    """What happened with one request."""

    received: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    sent: list[float] = field(default_factory=list)  # when each piece was


@dataclass
class ScriptedServer:
    """`script` says what becomes of the nth answer, from 0 on."""

    script: Callable[[int], Script]
    models: tuple[str, ...] = ("model",)
    port: int = 0
    served: list[Served] = field(default_factory=list)
    num_connections: int = 0

    @property
    def url(self) -> str:
        return f"{HOST}:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received = time.perf_counter()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        if path.endswith("/v1/models"):
            return await self._send(writer, 200, {"data": [{"id": name} for name in self.models]})
        served = Served(received, path, headers, json.loads(body))
        self.served.append(served)
        script = self.script(len(self.served) - 1)
        if script.raw is not None:
            writer.write(script.raw)
            await writer.drain()
            return False
        if script.status != 200:
            return await self._send(writer, script.status, {"error": {"message": script.message}})
        return await self._stream(writer, script, served)

    async def _send(self, writer: asyncio.StreamWriter, status: int, document: Any) -> bool:
        body = json.dumps(document).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return True

    async def _stream(self, writer: asyncio.StreamWriter, script: Script, served: Served) -> bool:
        def event(document: Any) -> None:
            data = b"data: " + (document if isinstance(document, bytes) else json.dumps(document).encode()) + b"\n\n"
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        writer.write(EVENT_HEAD.encode())
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for place in range(script.count):
            await asyncio.sleep(script.gap_s if place else script.first_s)
            served.sent.append(time.perf_counter())
            name = "text" if served.path.endswith("/v1/completions") else "delta"
            event({"choices": [{name: "word " if name == "text" else {"content": "word "}}]})
        if script.dies:
            await writer.drain()
            return False
        if script.message:
            event({"error": {"message": script.message}})
        if script.counts:
            count = script.count * script.tokens_per_piece
            event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
        event(b"[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@contextmanager
def scripted_server(
    script: Callable[[int], Script], *, models: tuple[str, ...] = ("model",), tls: ssl.SSLContext | None = None
) -> Iterator[ScriptedServer]:
    """In a thread of its own."""
    server = ScriptedServer(script, models)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def stop(listening: asyncio.Server) -> None:
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(server.serve, HOST, 0, ssl=tls), loop).result(20)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(listening), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
