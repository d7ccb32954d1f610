"""What is sent over /v1, and what becomes of every kind of answer."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from llmserve.benchmark.http_client import parse_server
from llmserve.benchmark.openai_endpoint import Events, OpenAiEndpoint, only_model
from llmserve.benchmark.records import LoadRequest, Record
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unavailable
from tests.benchmark.scripted_server import HOST, Script, ScriptedServer, scripted_server

TALK = [{"role": "user", "content": "hello"}]


async def asked(endpoint: OpenAiEndpoint) -> Record:
    record = Record()
    await endpoint.ask(LoadRequest("hello", 8), record)
    return record


async def asked_once(endpoint: OpenAiEndpoint) -> Record:
    try:
        return await asked(endpoint)
    finally:
        await endpoint.close()


def one_answer(script: Script | Callable[[int], Script], **options: Any) -> tuple[Record, ScriptedServer]:
    """Of a server that always does the same."""
    with scripted_server(script if callable(script) else lambda number: script) as server:
        return asyncio.run(asked_once(OpenAiEndpoint(parse_server(server.url, None), "model", **options))), server


def test_a_chat_is_streamed_counted_and_of_full_length() -> None:
    record, server = one_answer(Script(count=4, tokens_per_piece=2), api_key="sk-secret", more={"temperature": 0})
    assert (record.error, len(record.arrived), record.prompt_tokens, record.completion_tokens) == ("", 4, 5, 8)
    (served,) = server.served
    assert served.path == "/v1/chat/completions"
    assert served.headers["authorization"] == "Bearer sk-secret"
    assert served.body == {
        "model": "model", "messages": TALK, "max_tokens": 8, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0,
    }  # fmt: skip


def test_completions_take_the_text_as_it_is() -> None:
    record, server = one_answer(Script(count=2), is_chat=False, ignores_end=False)
    assert (record.error, len(record.arrived)) == ("", 2)
    assert server.served[0].path == "/v1/completions"
    assert server.served[0].body["prompt"] == "hello"
    assert not {"messages", "ignore_eos"} & server.served[0].body.keys()


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (Script(status=429, message="slow down"), "HTTP 429", "slow down"),
        (Script(count=2, message="it broke"), "error in the stream", "it broke"),
        (Script(count=2, dies=True), "connection lost", ""),
        (Script(raw=b"SSH-2.0-OpenSSH_9\r\n"), "not HTTP", ""),
        (Script(raw=b""), "connection lost", ""),
        (
            Script(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\ndata: [1]\n"),
            "event that is not in OpenAI's format",
            "",
        ),
        (Script(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"), "answer without an end", ""),
        (Script(raw=b"HTTP/1.1 502 Bad\r\nContent-Length: 5\r\n\r\n<no>!"), "HTTP 502", "<no>!"),
    ],
)
def test_each_failure_has_its_kind(script: Script, error: str, message: str) -> None:
    record, _ = one_answer(script)
    assert record.error == error
    assert message in record.message
    assert not record.is_unreachable


def test_nobody_there() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    server = parse_server(f"{HOST}:{port}", None)
    record = asyncio.run(asked_once(OpenAiEndpoint(server, "model")))
    assert (record.error, record.is_unreachable) == ("connection refused", True)
    with pytest.raises(Unavailable, match=f"no server answers at {HOST}:{port}"):
        asyncio.run(only_model(server, ""))


def test_connections_are_used_again_until_one_is_broken() -> None:
    scripts = [Script(), Script(), Script(dies=True), Script(), Script(status=500), Script()]

    async def several(endpoint: OpenAiEndpoint) -> list[str]:
        errors = [(await asked(endpoint)).error for _ in scripts]
        await endpoint.close()
        return errors

    with scripted_server(scripts.__getitem__) as server:
        endpoint = OpenAiEndpoint(parse_server(server.url, None), "model")
        assert asyncio.run(several(endpoint)) == ["", "", "connection lost", "", "HTTP 500", ""]
        assert server.num_connections == 2


def test_tls_with_certificates_of_ones_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(HOST).configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "root.pem"))
    with scripted_server(lambda number: Script(), tls=context) as server:
        trusting = parse_server(f"https://{server.url}", tmp_path / "root.pem")
        assert asyncio.run(asked_once(OpenAiEndpoint(trusting, "model"))).error == ""
        assert asyncio.run(only_model(trusting, "")) == "model"
        wary = asyncio.run(asked_once(OpenAiEndpoint(parse_server(f"https://{server.url}", None), "model")))
        assert (wary.error, wary.is_unreachable) == ("cannot connect", True)
        assert "certificate verify failed" in wary.message


def test_events_may_come_in_any_pieces() -> None:
    whole = (
        b': comment\r\nevent: x\r\ndata: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\r\n\r\n'
        b'data:{"choices":[{"delta":{"content":"\xc3\xa4"}}],"usage":null}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, len(whole)):
        record = Record()
        events = Events(record)
        for place in range(0, len(whole), size):
            events.feed(float(place), whole[place : place + size])
        assert (record.error, len(record.arrived), events.has_ended) == ("", 2, True)


def test_the_one_model_is_found() -> None:
    with scripted_server(lambda number: Script(), models=("a",)) as server:
        assert asyncio.run(only_model(parse_server(f"http://{server.url}/v1/", None), "")) == "a"
    for names, words in ((("a", "b"), "choose a model with --model: a, b"), ((), "the server has none")):
        with (
            scripted_server(lambda number: Script(), models=names) as server,
            pytest.raises(InvalidArgument, match=words),
        ):
            asyncio.run(only_model(parse_server(server.url, None), ""))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", InvalidArgument, "requires a valid API key.* --api-key"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", NotFound, "the route does not exist"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nhm", LlmserveError, "answers HTTP 500: hm"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", Unavailable, "lists no models"),
        (b"220 smtp.example ESMTP\r\n", Unavailable, "does not respond like a server of /v1"),
    ],
)  # fmt: skip
async def test_what_is_there_is_no_server_of_openais_api(answer: bytes, kind: type[Exception], words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(kind, match=words):
            await only_model(parse_server(f"{HOST}:{port}", None), "")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://x", "expected http://HOST:PORT"), ("http://", "expected http"), ("x:port", "x:port"),
        ("x:99999", "x:99999"), ("http://user:secret@x", "expected http"), ("http://x?y=1", "expected http"),
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_server(url, None)


def test_certificates_are_for_tls_and_must_be_some(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="require TLS"):
        parse_server("x:1", tmp_path)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        parse_server("https://x:1", tmp_path / "gone.pem")
    (tmp_path / "none.pem").write_text("none")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        parse_server("https://x:1", tmp_path / "none.pem")


def test_where_a_server_is() -> None:
    server = parse_server("http://[::1]:8000/base/v1", None)
    assert (server.host, server.port, server.prefix, server.host_header) == ("::1", 8000, "/base", "[::1]:8000")
    assert parse_server("https://x", None).port == 443
