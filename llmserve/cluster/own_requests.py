"""Messages between llmserve's own server and llmserve's workers, inside Dynamo's messages.

Dynamo's requests have fewer fields than llmserve's, and its chunks fewer than llmserve's events. So each has a frame of
the engine's socket protocol in a field that Dynamo does not read. A request has a complete request or a query for the
engine; a chunk has events, an error or the answer to that query. Each frame begins with the preamble, which detects
another version.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmserve.core import GenerateRequest, TokenEvent
from llmserve.engine.base import Engine, EngineInfo
from llmserve.engine.remote.frames import MAX_ANSWER_BYTES, Frame, FrameReader, Kind, ProtocolError, preamble
from llmserve.engine.remote.messages import (
    EngineState,
    EventWriter,
    GuideSource,
    Item,
    hello_frame,
    read_events,
    read_hello,
    read_submit,
    submit_frame,
)
from llmserve.errors import LlmserveError

KEY = "llmserve"
REQUEST_FIELD, CHUNK_FIELD = "extra_args", "engine_data"
STREAM = 0  # the only one in a message
LAST: Mapping[str, Any] = {"token_ids": [], "index": 0, "finish_reason": "stop"}  # a stream without it counts as cut

Fields = Mapping[str, Any]


def request_fields(request: GenerateRequest, model: str) -> dict[str, Any]:
    """A request, with the prompt in Dynamo's field. Raises `Unsupported` for a guide that cannot be sent."""
    frame = submit_frame(replace(request, prompt_ids=()), STREAM)
    return _fields(model, request.prompt_ids, frame)


def hello_fields(model: str) -> dict[str, Any]:
    """A query for the worker's engine."""
    return _fields(model, (0,), Frame(Kind.HELLO))


def asked(fields: Fields) -> Frame | None:
    """The frame from `request_fields` or `hello_fields`; None in other requests. Raises `ProtocolError`."""
    return _taken_out(fields, REQUEST_FIELD)


def read_request(fields: Fields, frame: Frame, request_id: str) -> tuple[GenerateRequest, GuideSource | None]:
    """Raises `ProtocolError`."""
    _, request, guide = read_submit(frame)
    return replace(request, request_id=request_id, prompt_ids=tuple(fields["token_ids"])), guide


def event_chunk(event: TokenEvent) -> dict[str, Any]:
    events = EventWriter()
    events.add(STREAM, event)
    return _chunk(events.frame(), event.token_ids)


def error_chunk(error: LlmserveError) -> dict[str, Any]:
    events = EventWriter()
    events.fail(STREAM, error)
    return _chunk(events.frame())


def hello_chunk(engine: Engine) -> dict[str, Any]:
    return _chunk(hello_frame(engine.info, EngineState(engine.stats(), engine.healthy(), {})))


def read_chunk(chunk: Fields) -> list[Item]:
    """Events, or the error that ends the answer; empty for the last chunk. Raises `ProtocolError`."""
    frame = _taken_out(chunk, CHUNK_FIELD)
    return [] if frame is None else [item for _, item in read_events(frame)]


def read_hello_chunk(chunk: Fields) -> tuple[EngineInfo, EngineState]:
    """Raises `ProtocolError`."""
    frame = _taken_out(chunk, CHUNK_FIELD)
    if frame is None:
        raise ProtocolError("it does not identify itself; it is not an llmserve worker, or it is an older version")
    return read_hello(frame)


def _fields(model: str, prompt: Sequence[int], frame: Frame) -> dict[str, Any]:
    return {
        "model": model,
        "token_ids": list(prompt),
        "sampling_options": {},
        "stop_conditions": {},
        "output_options": {},
        REQUEST_FIELD: {KEY: _text(frame)},
    }


def _chunk(frame: Frame, token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """A chunk. Its tokens are also in Dynamo's field, where Dynamo counts them."""
    return {"token_ids": list(token_ids), "index": 0, CHUNK_FIELD: {KEY: _text(frame)}}


def _text(frame: Frame) -> str:
    return base64.b64encode(preamble() + frame.encoded()).decode()


def _taken_out(fields: Fields, name: str) -> Frame | None:
    text = (fields.get(name) or {}).get(KEY)
    if text is None:
        return None
    try:
        frames = list(FrameReader(MAX_ANSWER_BYTES).feed(base64.b64decode(text, validate=True)))
    except (TypeError, ValueError, binascii.Error) as error:
        raise ProtocolError(f"no frame: {error}") from error
    if len(frames) != 1:
        raise ProtocolError(f"{len(frames)} frames where one should be")
    return frames[0]
