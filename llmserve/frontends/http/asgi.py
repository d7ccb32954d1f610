"""An ASGI application behind our own listener.

    scope       HTTP/1.0 or 1.1, with the wire's own request as the extension `llmserve.request`
    receive     the whole body, read within the server's limits (raises their errors), then the client's disconnect
    send        blocks the application while the client does not read

If the client disconnects, the application is cancelled, like any other handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from llmserve.core import Tenant
from llmserve.errors import InternalError
from llmserve.frontends.http.bodies import read_body
from llmserve.wire.http1.answers import Reply
from llmserve.wire.http1.request import ClientGone, Request

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

VERSIONS = {"version": "3.0", "spec_version": "2.4"}
REQUEST = "llmserve.request"  # among the scope's extensions


@dataclass(frozen=True, slots=True)
class AsgiAnswer:
    """An application's answer to one request, whose body has at most `max_input_bytes`."""

    application: Application
    request: Request
    max_input_bytes: int
    more_headers: Callable[[], Mapping[str, str]] = dict  # for the answer, called when it begins

    async def send(self, reply: Reply) -> None:
        await self.request.while_connected(self._run(reply))

    async def _run(self, reply: Reply) -> None:
        exchange = _Exchange(self, reply)
        await self.application(scope_of(self.request), exchange.receive, exchange.send)
        if not reply.is_complete:
            raise InternalError(f"the application did not answer {self.request.method} {self.request.path}")


def scope_of(request: Request, tenant: Tenant | None = None) -> Message:
    """`tenant` overrides the one of the request's headers. HEAD becomes GET; the body of its answer is not sent."""
    return {
        "type": "http",
        "asgi": VERSIONS,
        "http_version": "1.0" if request.is_http10 else "1.1",
        "method": "GET" if request.method == "HEAD" else request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": None,
        "query_string": request.query,
        "root_path": "",
        "headers": request.fields,
        "client": None,
        "server": None,
        "extensions": {REQUEST: {"request": request, "tenant": tenant}},
    }


class _Exchange:
    """The events of one request and its answer."""

    def __init__(self, answer: AsgiAnswer, reply: Reply) -> None:
        self._request = answer.request
        self._reply = reply
        self._max_input_bytes = answer.max_input_bytes
        self._more_headers = answer.more_headers
        self._has_body = False  # whether the body was received
        self._status = 0  # none yet
        self._headers: dict[str, str] = {}
        self._content_type = ""

    async def receive(self) -> Message:
        if not self._has_body:
            self._has_body = True
            body = await read_body(self._request, self._max_input_bytes)
            return {"type": "http.request", "body": bytes(body), "more_body": False}
        try:
            while True:
                await self._request.more_body()
        except ClientGone:
            return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Sends one event. Events out of ASGI's order are a bug of the application, so they fail an assertion."""
        reply = self._reply
        if message["type"] == "http.response.start":
            assert not self._status
            self._status = message["status"]
            self._read_headers(message.get("headers", ()))
            self._headers.update(self._more_headers())
            return
        assert self._status
        assert not reply.is_complete
        body = message.get("body", b"")
        if reply.has_begun:
            if body:
                await reply.piece(body)
            if not message.get("more_body"):
                reply.end()
        elif message.get("more_body"):
            reply.begin(self._status, self._headers, self._content_type)
            if body:
                await reply.piece(body)
        else:
            await reply.whole(self._status, self._headers, self._content_type, body)

    def _read_headers(self, headers: Any) -> None:
        """Reads all headers except those that the reply writes itself."""
        for raw_name, value in headers:
            name = raw_name.decode("latin-1").lower()
            if name == "content-type":
                self._content_type = value.decode("latin-1")
            elif name not in ("content-length", "transfer-encoding", "date"):
                self._headers[name.title()] = value.decode("latin-1")
