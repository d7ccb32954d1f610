"""Connections are tested on both event loops, whose transports are not quite the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from llmserve.wire.http1.server import HttpServer, serve
from tests.wire.http1.raw_client import HOST, Client, Connect, Handlers


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest_asyncio.fixture
async def server(handlers: Handlers) -> AsyncIterator[HttpServer]:
    made = await serve(handlers, HOST, 0, flag="--http-port")
    yield made
    handlers.may_end.set()
    await made.stop()


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Client] = []

    async def connected(server: HttpServer) -> Client:
        made.append(Client(*await asyncio.open_connection(HOST, server.port)))
        return made[-1]

    async with asyncio.timeout(20):
        yield connected
    for client in made:
        client.writer.close()


@pytest_asyncio.fixture
async def client(server: HttpServer, connect: Connect) -> Client:
    return await connect(server)
