"""Many clients on one engine's socket, some of which do not behave."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.core import GenerateRequest, SamplingParams, Tenant, TokenEvent
from llmserve.engine.base import MeteringEngine
from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner, fake_answer, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.engine.remote.client import RemoteEngine
from llmserve.engine.remote.frames import MAGIC, PREAMBLE, VERSION, Frame, FrameReader, Kind, preamble
from llmserve.engine.remote.messages import read_events, submit_frame
from llmserve.engine.remote.replaceable import SocketEngine
from llmserve.engine.remote.server import ClientLimits
from llmserve.errors import EngineFileError, InvalidArgument, RateLimited, ResourceExhausted, Unavailable
from llmserve.scheduler.settings import SchedulerSettings
from tests.engine.remote.conftest import Served, serving
from tests.engine.test_adapters import adapters

REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=20, temperature=0.0))
LONG = replace(REQUEST, sampling=SamplingParams(max_tokens=250, temperature=0.0))
WAIT_S = 20


async def answer_of(engine: RemoteEngine, request: GenerateRequest = REQUEST) -> list[int]:
    async with aclosing(engine.submit(request)) as stream:
        return [token async for event in stream for token in event.token_ids]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def plain_client(served: Served, first: bytes) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(WAIT_S)
    client.connect(str(served.path))
    client.sendall(first)
    return client


def all_of(client: socket.socket) -> bytes:
    """What comes until the other end closes."""
    with client:
        data = b""
        while more := client.recv(1 << 16):
            data += more
        return data


def test_the_socket_is_for_this_user_alone(served: Served) -> None:
    assert stat.S_IMODE(served.path.stat().st_mode) == 0o600


async def test_clients_share_an_engine(served: Served) -> None:
    clients = [RemoteEngine.connect(served.path) for _ in range(3)]
    expected = list(fake_answer(REQUEST.prompt_ids, 20, vocab_size=1000))
    answers = await asyncio.gather(*(answer_of(client) for client in clients for _ in range(4)))
    assert answers == [expected] * 12
    assert clients[0].info == served.engine.info
    clients[0].close()
    assert await answer_of(clients[1]) == expected
    for client in clients:
        client.close()


def test_a_step_is_one_message_for_all_streams_of_a_client(served: Served) -> None:
    submits = b"".join(submit_frame(REQUEST, number).encoded() for number in range(8))
    with plain_client(served, preamble() + submits) as client:
        reader, steps, num_events = FrameReader(1 << 20), 0, 0
        while num_events < 8 * 20:
            for frame in reader.feed(client.recv(1 << 16)):
                if frame.kind is Kind.EVENTS:
                    steps += 1
                    num_events += len(read_events(frame))
    assert steps <= served.engine.stats().iteration < 8 * 20


def tokens_of(client: socket.socket, reader: FrameReader, stream_id: int) -> int:
    """All 20 that `REQUEST` has."""
    num_tokens = 0
    while num_tokens < 20:
        data = client.recv(1 << 16)
        assert data, "the connection has ended"
        for frame in reader.feed(data):
            if frame.kind is Kind.EVENTS:
                num_tokens += sum(one == stream_id for one, _ in read_events(frame))
    return num_tokens


def test_a_stream_that_is_cancelled_before_it_begins_is_forgotten(served: Served) -> None:
    cancelled = submit_frame(LONG, 5).encoded() + Frame(Kind.CANCEL, integers=[5]).encoded()
    with plain_client(served, preamble() + cancelled + submit_frame(REQUEST, 6).encoded()) as client:
        reader = FrameReader(1 << 20)
        assert tokens_of(client, reader, 6) == 20
        client.sendall(submit_frame(REQUEST, 5).encoded())
        assert tokens_of(client, reader, 5) == 20


async def test_a_client_that_goes_has_its_sequences_freed(served: Served) -> None:
    gone, other = RemoteEngine.connect(served.path), RemoteEngine.connect(served.path)
    stream = gone.submit(LONG)
    await anext(stream)
    gone.close()
    with pytest.raises(Unavailable, match="has been closed"):
        async for _ in stream:
            pass
    until(lambda: served.engine.stats().used_num_blocks == 0)
    assert len(await answer_of(other)) == 20
    other.close()


def test_a_client_that_is_killed_has_its_sequences_freed(served: Served) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from llmserve.engine.remote.client import RemoteEngine\n"
        "from tests.engine.remote.test_server import LONG\n"
        "async def main():\n"
        "    stream = RemoteEngine.connect(Path(sys.argv[1])).submit(LONG)\n"
        "    await anext(stream)\n"
        "    print('begun', flush=True)\n"
        "    async for _ in stream: pass\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(served.path)], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "begun\n"
        client.kill()
    until(lambda: served.engine.stats().num_active_requests == 0 and not served.server.clients)
    assert served.engine.stats().used_num_blocks == 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not llmserve's engine protocol"),
        (PREAMBLE.pack(MAGIC, 99), "version 99"),
        (preamble() + b"\xff" * 64, "a frame has .* bytes; the limit is"),
        (preamble() + Frame(Kind.HELLO).encoded(), "which only engines send"),
        (preamble() + Frame(Kind.SUBMIT, {"stream": 1}).encoded(), "invalid request"),
        (preamble() + submit_frame(LONG, 1).encoded() * 2, "stream 1 is already open"),
    ],
)
async def test_foreign_bytes_end_that_connection_only(
    served: Served, data: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = RemoteEngine.connect(served.path)
    stream = other.submit(REQUEST)
    await anext(stream)
    with caplog.at_level(logging.WARNING):
        all_of(plain_client(served, data))
        until(lambda: any(re.search(words, record.getMessage()) for record in caplog.records))
    assert sum([len(event.token_ids) async for event in stream]) == 19
    other.close()
    until(lambda: served.engine.stats().used_num_blocks == 0)


def test_a_client_of_another_version_says_so(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        client = subprocess.Popen(
            [sys.executable, "-c", "import sys, pathlib\nfrom llmserve.engine.remote.client import RemoteEngine\n"
             "RemoteEngine.connect(pathlib.Path(sys.argv[1]))", str(tmp_path / "s")], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        server, _ = listening.accept()
        with server:
            assert server.recv(8) == preamble()
            server.sendall(PREAMBLE.pack(MAGIC, VERSION + 1))
            _, said = client.communicate(timeout=WAIT_S)
    assert "Unavailable: no engine is listening at" in said
    assert f"uses version {VERSION + 1} of the engine protocol, this side version {VERSION}" in said


async def test_who_does_not_read_is_cut_off_and_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine(replace(FAKE_RUNNER_INFO, vocab_size=20_000))
    with serving(engine, ClientLimits(waiting_bytes=1 << 18, stalled_s=0.0)) as served:
        wanting = replace(LONG, return_generation_logits=True)  # 80 kB a token
        stuck = plain_client(served, preamble() + submit_frame(wanting, 0).encoded())
        other = RemoteEngine.connect(served.path)
        assert len(await answer_of(other, LONG)) == 250
        until(lambda: len(served.server.clients) == 1)
        until(lambda: engine.stats().used_num_blocks == 0)
        assert len(await answer_of(other, LONG)) == 250
        stuck.close()
        other.close()
    assert "does not read and was disconnected" in caplog.text


async def test_what_the_engine_refuses_keeps_its_class() -> None:
    engine = fake_engine(settings=SchedulerSettings(max_queue_size=1), step_delay_s=0.001)
    with serving(engine) as served:
        client = RemoteEngine.connect(served.path)
        with pytest.raises(InvalidArgument, match="the prompt is empty"):
            client.submit(replace(REQUEST, prompt_ids=()))
        with pytest.raises(InvalidArgument, match="asks for 100 answers"):
            await answer_of(client, replace(REQUEST, num_sequences=100))
        results = await asyncio.gather(*(answer_of(client, LONG) for _ in range(80)), return_exceptions=True)
        refused = [result for result in results if not isinstance(result, list)]
        assert {type(error) for error in refused} == {ResourceExhausted}
        client.close()


async def test_tenants_are_held_to_their_limits_and_told_what_is_left(served: Served) -> None:
    tenant = Tenant("t", max_answers=1, tokens_per_minute=1000, adapters=("one",))
    client = RemoteEngine.connect(served.path)
    assert isinstance(client, MeteringEngine)
    assert client.allowance(tenant).num_tokens == 1000
    stream = client.submit(replace(LONG, tenant=tenant))
    await anext(stream)
    with pytest.raises(RateLimited) as refused:
        await answer_of(client, replace(REQUEST, tenant=tenant))
    assert refused.value.limit == "max_answers"
    rest = [event async for event in stream]
    assert sum(len(event.token_ids) for event in rest) == 249
    until(lambda: 700 < client.allowance(tenant).num_tokens < 800)
    client.close()


def test_an_engine_that_comes_back_after_another_one_is_used(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    info, path = served.engine.info, served.path.with_name("shared.sock")
    with closing(Served(fake_engine(), path, None)):
        engine = SocketEngine(path, info.digest)
    other = InflightEngine(FakeRunner(), replace(info, digest="f" * 64))
    with closing(engine):
        with closing(Served(other, path, None)):
            until(lambda: "serve the engine's own directory" in caplog.text)
        with closing(Served(fake_engine(), path, None)):
            until(engine.healthy)


async def test_clients_have_adapters_of_their_own(served: Served, tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)
    one, other = RemoteEngine.connect(served.path), RemoteEngine.connect(served.path)
    await asyncio.to_thread(one.add_adapter, first)
    for adapter in (first, second):
        await asyncio.to_thread(other.add_adapter, adapter)
    asked = [(engine, replace(REQUEST, adapter=digest)) for engine, digest in
             ((one, ""), (one, first.digest), (other, first.digest), (other, second.digest))]  # fmt: skip
    found = await asyncio.gather(*(answer_of(*each) for each in asked))
    assert found == [fake_answer((1, 2, 3), 20, adapter=request.adapter) for _, request in asked]
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        one.submit(replace(REQUEST, adapter=second.digest))
    async with aclosing(other.submit(replace(LONG, adapter=first.digest))) as stream:
        tokens = [*(await anext(stream)).token_ids]
        one.close()  # takes its own away
        tokens += [token async for event in stream for token in event.token_ids]
    assert tokens == fake_answer((1, 2, 3), 250, adapter=first.digest)
    other.remove_adapter(first.digest)
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        other.submit(replace(REQUEST, adapter=first.digest))
    (second.path / "weights.bin").write_bytes(b"")
    other.remove_adapter(second.digest)
    other.close()
    third = RemoteEngine.connect(served.path)
    until(lambda: not served.engine._adapters.digests)  # type: ignore[attr-defined]
    with pytest.raises(EngineFileError, match=r"weights.bin was changed"):
        await asyncio.to_thread(third.add_adapter, second)
    third.close()


async def test_an_engine_that_drains_ends_its_answers_and_takes_no_new_ones(served: Served) -> None:
    client = RemoteEngine.connect(served.path)
    stream = client.submit(REQUEST)
    first = await anext(stream)
    draining = asyncio.get_running_loop().run_in_executor(None, served.call, served.server.drain(10))
    until(lambda: served.server.is_draining)
    with pytest.raises(Unavailable, match="shutting down: send the request again"):
        await anext(client.submit(REQUEST))
    rest = [token async for event in stream for token in event.token_ids]
    assert [*first.token_ids, *rest] == list(fake_answer(REQUEST.prompt_ids, 20, vocab_size=1000))
    await draining
    client.close()


async def test_an_engine_drains_no_longer_than_it_may(served: Served) -> None:
    client = RemoteEngine.connect(served.path)
    stream = client.submit(LONG)
    await anext(stream)
    await asyncio.to_thread(served.call, served.server.drain(0.01))
    await anext(stream)
    await stream.aclose()
    client.close()


async def test_a_closed_engine_ends_the_streams_of_its_clients() -> None:
    with serving() as served:
        client = RemoteEngine.connect(served.path)
        stream = client.submit(LONG)
        await anext(stream)
    with pytest.raises(Unavailable, match="the engine has been closed"):
        async for _ in stream:
            pass
    until(lambda: not client.healthy())
    client.close()


def test_a_stream_whose_loop_is_gone_is_cancelled(served: Served) -> None:
    client = RemoteEngine.connect(served.path)
    loop = asyncio.new_event_loop()
    stream = client.submit(LONG)
    event: TokenEvent = loop.run_until_complete(anext(stream))
    assert event.token_ids
    loop.close()
    until(lambda: served.engine.stats().iteration > 0 and served.engine.stats().used_num_blocks == 0)
    client.close()


def test_the_client_imports_little() -> None:
    code = (
        "import sys, llmserve.engine.remote.client\n"
        "names = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in names if not name.startswith('_') and name != 'sitecustomize'))\n"
        "print(sorted(name for name in sys.modules if name.startswith('llmserve.')))"
    )
    packages, modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert packages == "['llmserve', 'numpy']"
    assert "inflight" not in modules
