"""Streams the pieces of an answer: as server-sent events, or as one JSON object per line.

The status waits for the first piece: an error before it is an ordinary error. A later error is an event, which ends the
stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from json.encoder import encode_basestring

from fastapi.responses import Response

from llmserve.frontends.http.asgi import Message, Receive, Send
from llmserve.frontends.http.error_answers import JSON
from llmserve.frontends.http.json_fields import ENCODER, Json, encode_json
from llmserve.frontends.text.answers.failures import Failure, error_document, failure_of

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
json_string: Callable[[str], str] = encode_basestring


def data(document: Json) -> bytes:
    return b"data: " + encode_json(document) + b"\n\n"


def named_event(document: Json) -> bytes:
    """An event whose name is the document's type."""
    return b"event: " + str(document["type"]).encode() + b"\n" + data(document)


class Template:
    """An event in which only texts vary: `SLOT` marks each of them in a document that is encoded once."""

    SLOT = "\0"

    def __init__(self, encode: Callable[[Json], bytes], document: Json) -> None:
        self._parts = encode(document).decode().split(json_string(self.SLOT))

    def filled(self, *texts: str) -> bytes:
        """`texts`: encoded JSON strings, one per slot."""
        parts = self._parts
        if len(texts) == 1:
            return f"{parts[0]}{texts[0]}{parts[1]}".encode("utf-8", "replace")
        filled = [*(part + text for part, text in zip(parts, texts, strict=False)), parts[-1]]
        return "".join(filled).encode("utf-8", "replace")


class EventStream(Response):
    """`events` are complete and encoded."""

    media_type = EVENT_STREAM

    def __init__(self, events: AsyncGenerator[bytes, None], media_type: str = EVENT_STREAM) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        async with aclosing(self._events) as events:
            try:
                first = await anext(events, b"")
            except Exception as error:  # border: an internal error is answered, too
                await error_response(path, failure_of(error))(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:  # border: the answer has begun, so the error is part of it
                document = error_document(path, failure_of(error))
                last = _last_words(path, document, is_lines=self.media_type != EVENT_STREAM)
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _last_words(path: str, document: Json, *, is_lines: bool) -> bytes:
    if is_lines:
        return encode_json(document) + b"\n"
    return named_event(document) if path.startswith("/v1/messages") else data(document)


def error_response(path: str, failure: Failure) -> Response:
    return Response(
        encode_json(error_document(path, failure)), failure.status, media_type=JSON, headers=failure.headers
    )


def json_answer(document: Json) -> Response:
    return Response(encode_json(document), media_type=JSON)


def encoded_slowly(document: Json) -> bytes:
    """Encodes in many steps, so that other threads can run. Call it in a thread, for documents that may be large."""
    return "".join(ENCODER.iterencode(document)).encode("utf-8", "replace")
