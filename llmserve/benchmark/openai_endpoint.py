"""Sends requests over OpenAI's API, streaming: /v1/chat/completions or /v1/completions of any server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llmserve.benchmark.http_client import BadAnswer, Connection, ConnectionLost, Connections, Server
from llmserve.benchmark.records import LoadRequest, Record
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unavailable

Json: TypeAlias = Any
DONE = b"[DONE]"
TEXTS = ("content", "reasoning_content", "reasoning", "text")  # fields of a delta or a choice that have text
KEY_WORDS = "give it with --api-key KEY or in LLMSERVE_API_KEY"
OTHER_PORT = "--url takes the server's HTTP port (8000 by default), not that of gRPC (8001) or metrics (8002)"


@dataclass(slots=True)
class OpenAiEndpoint:
    server: Server
    model: str
    api_key: str = field(default="", repr=False)
    is_chat: bool = True
    ignores_end: bool = True  # answers have the maximum length (`ignore_eos`, an extension of OpenAI's API)
    more: Mapping[str, Json] = field(default_factory=dict)  # additional fields of the body
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.connections = Connections(self.server)

    async def ask(self, request: LoadRequest, record: Record) -> None:
        path = "/v1/chat/completions" if self.is_chat else "/v1/completions"
        message = self._message("POST", path, json.dumps(self._body(request)).encode())
        events = Events(record)
        try:
            connection = await self.connections.take()
        except OSError as error:  # also TimeoutError and SSLError
            refused = isinstance(error, ConnectionRefusedError)
            record.fail("connection refused" if refused else "cannot connect", str(error), is_unreachable=True)
            return
        try:
            status = await connection.exchange(message, events.feed)
            if status != 200:
                record.fail(f"HTTP {status}", error_text(bytes(connection.kept)))
            elif not events.has_ended:
                record.fail("answer without an end")
        except ConnectionLost as error:
            record.fail("connection lost", str(error))
        except BadAnswer as error:
            record.fail("not HTTP", str(error))
        finally:
            self.connections.give_back(connection)

    async def close(self) -> None:
        await self.connections.close()

    def _body(self, request: LoadRequest) -> dict[str, Json]:
        prompt = request.prompt
        asked: dict[str, Json]
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
        else:
            asked = {"prompt": prompt}
        limits = {"max_tokens": request.max_tokens, **({"ignore_eos": True} if self.ignores_end else {})}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **asked, **limits, **streamed, **self.more}

    def _message(self, method: str, path: str, body: bytes = b"") -> bytes:
        return http_message(self.server, method, path, body, self.api_key)


def http_message(server: Server, method: str, path: str, body: bytes, api_key: str) -> bytes:
    lines = [
        f"{method} {server.prefix}{path} HTTP/1.1",
        f"Host: {server.host_header}",
        "User-Agent: llmserve-bench",
        *(("Content-Type: application/json", f"Content-Length: {len(body)}") if body else ()),
        *((f"Authorization: Bearer {api_key}",) if api_key else ()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


class Events:
    """Reads the server-sent events of one answer into its record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self.has_ended = False

    def feed(self, moment: float, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(moment, line[5:].strip())

    def _event(self, moment: float, data: bytes) -> None:
        if data == DONE:
            self.has_ended = True
            return
        try:
            document = json.loads(data)
            if error := document.get("error"):
                self._record.fail("error in the stream", str(error.get("message", error)))
                return
            for choice in document.get("choices", ()):
                piece = choice.get("delta") or choice
                if any(piece.get(name) for name in TEXTS):
                    self._record.arrived.append(moment)
            if usage := document.get("usage"):
                self._record.prompt_tokens = usage["prompt_tokens"]
                self._record.completion_tokens = usage["completion_tokens"]
                self._record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                drafts = usage.get("completion_tokens_details") or {}
                self._record.accepted_tokens = drafts.get("accepted_prediction_tokens") or 0
                rejected = drafts.get("rejected_prediction_tokens") or 0
                self._record.drafted_tokens = self._record.accepted_tokens + rejected
        except (ValueError, AttributeError, KeyError, TypeError):
            self._record.fail("event that is not in OpenAI's format", data[:100].decode("utf-8", "replace"))


def error_text(body: bytes) -> str:
    """Returns the message of an error in OpenAI's format, or the beginning of the body."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body[:200].decode("utf-8", "replace").strip()


async def only_model(server: Server, api_key: str) -> str:
    """Returns the name of the server's only model. Raises `LlmserveError` if no server answers, or without such a
    model."""
    body = bytearray()
    connection: Connection | None = None
    connections = Connections(server)
    try:
        connection = await connections.take()
        message = http_message(server, "GET", "/v1/models", b"", api_key)
        status = await connection.exchange(message, lambda moment, data: body.extend(data))
    except OSError as error:
        raise unreachable(server, str(error)) from error
    except (ConnectionLost, BadAnswer) as error:
        raise Unavailable(
            f"{server.host_header} does not respond like a server of /v1: {error}; {OTHER_PORT}"
        ) from error
    finally:
        if connection is not None:
            await connection.close()
    if status != 200:
        raise refusal(server, f"HTTP {status}", error_text(bytes(connection.kept)))
    try:
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{server.host_header} lists no models under /v1/models; {OTHER_PORT}") from error
    if len(names) != 1:
        raise InvalidArgument(f"choose a model with --model: {', '.join(names) or 'the server has none'}")
    return names[0]


def unreachable(server: Server, reason: str) -> Unavailable:
    what_to_do = "start one with `llmserve serve ENGINE_DIR`, or check --url"
    return Unavailable(f"no server answers at {server.host_header} ({reason}); {what_to_do}")


def refusal(server: Server, kind: str, message: str) -> LlmserveError:
    """Returns the error for a failed request, with advice for the user of the command."""
    if kind == "HTTP 401":
        return InvalidArgument(f"{server.host_header} requires a valid API key: {KEY_WORDS}")
    if kind == "HTTP 404":
        return NotFound(f"{server.host_header}: {message or 'the route does not exist'}")
    failure = InvalidArgument if kind == "HTTP 400" else LlmserveError
    return failure(f"{server.host_header} answers {kind}: {message}")
