"""Silent clients are asked for a sign of life; connections that are old enough are let go of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from llmserve.frontends.grpc.inference_service import start_grpc
from llmserve.wire.http2 import frames
from llmserve.wire.http2.frames import frame
from llmserve.wire.http2.keepalive import ConnectionLimits, Keepalive
from tests.frontends.grpc.test_inference_service import count_request
from tests.frontends.server import HOST
from tests.frontends.stub_core import StubCore
from tests.wire.http2.raw_client import RawClient

SOON = ConnectionLimits(ping_after_s=0.1, ping_timeout_s=1)


class StandingClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_later = loop.call_later
        self.now = loop.time() + 1

    def time(self) -> float:
        return self.now


@asynccontextmanager
async def client_of(limits: ConnectionLimits, core: StubCore) -> AsyncIterator[RawClient]:
    server = await start_grpc(core, HOST, 0, limits=limits)
    client = await asyncio.to_thread(RawClient, server.port)
    try:
        yield client
    finally:
        client.socket.close()
        await server.stop()


def start_slow_call(client: RawClient) -> None:
    client.call(1, "ModelInfer", service_pb2.ModelInferRequest(model_name="slow").SerializeToString())


async def test_a_client_that_answers_stays_and_one_that_does_not_is_let_go_of() -> None:
    core = StubCore()

    def answer_three_pings(client: RawClient) -> None:
        start_slow_call(client)
        for _ in range(3):
            client.send(frame(frames.PING, frames.ACK, 0, client.until(frames.PING)))
        assert core.running == 1
        fields = client.status(1)
        assert (fields["grpc-status"], fields["grpc-message"]) == ("14", "the client does not answer pings")
        with pytest.raises((EOFError, ConnectionError)):
            client.receive()

    async with client_of(SOON, core) as client:
        await asyncio.to_thread(answer_three_pings, client)
        assert core.running == 0


async def test_an_answer_within_a_tick_of_the_clock_counts() -> None:
    """uvloop's clock has milliseconds."""
    asked: list[str] = []

    class Connection:
        has_calls = True

        def ping(self) -> None:
            asked.append("ping")
            keepalive.heard()  # at the same time, as the clock has it

        def leave(self) -> None: ...

        def abort(self, reason: str = "") -> None:
            asked.append(reason)

    keepalive = Keepalive(ConnectionLimits(ping_after_s=1e-9, ping_timeout_s=1e-9), Connection())
    keepalive._loop = StandingClock(asyncio.get_running_loop())  # type: ignore[assignment]
    for _ in range(100):  # turns of the loop: its timers are due at once
        await asyncio.sleep(0)
    keepalive.stop()
    assert asked == ["ping"]


async def test_clients_without_calls_are_asked_when_that_is_wanted() -> None:
    async with client_of(SOON, StubCore()) as client:
        client.socket.settimeout(0.4)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(client.until, frames.PING)
    limits = ConnectionLimits(ping_after_s=0.1, ping_timeout_s=0.2, pings_without_calls=True)
    async with client_of(limits, StubCore()) as client:
        await asyncio.to_thread(client.until, frames.PING)


async def test_calls_do_not_notice_that_connections_come_and_go() -> None:
    core = StubCore()
    server = await start_grpc(core, HOST, 0, limits=ConnectionLimits(max_age_s=0.05))
    async with grpc.aio.insecure_channel(f"{HOST}:{server.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        peers = set()

        async def ask(times: int) -> None:
            for _ in range(times):
                call = stub.ServerReady(service_pb2.ServerReadyRequest())
                assert (await call).ready
                await asyncio.sleep(0.002)

        async def look() -> None:
            for _ in range(200):
                peers.update(server.peers())
                await asyncio.sleep(0.002)

        await asyncio.gather(look(), *(ask(150) for _ in range(8)))
    await server.stop()
    assert len(peers) > 3


async def test_calls_that_last_too_long_end_with_their_connection() -> None:
    limits = ConnectionLimits(max_age_s=0.1, max_age_grace_s=0.2)
    server = await start_grpc(StubCore(), HOST, 0, limits=limits)
    async with grpc.aio.insecure_channel(f"{HOST}:{server.port}") as channel:
        stream = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await stream.write(count_request(-1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the connection has reached its maximum age"
    await server.stop()


async def test_a_connection_that_leaves_says_the_same_last_call_each_time() -> None:
    """RFC 9113, 6.8: it must not grow, though calls that come meanwhile are refused."""
    server = await start_grpc(StubCore(), HOST, 0, limits=ConnectionLimits(max_age_s=0.1))
    client = await asyncio.to_thread(RawClient, server.port)
    start_slow_call(client)
    first = await asyncio.to_thread(client.until, frames.GOAWAY)
    client.call(3, "ServerReady", b"")
    assert await asyncio.to_thread(client.until, frames.RST_STREAM, 3) == frames.WORD.pack(frames.REFUSED_STREAM)
    client.send(frame(frames.PUSH_PROMISE, 0, 1, bytes(4)))  # which ends the connection
    second = await asyncio.to_thread(client.until, frames.GOAWAY)
    assert first[:4] == second[:4] == frames.WORD.pack(1)
    client.socket.close()
    await server.stop()
