"""POST /v1/responses: text in, text out, whole or as typed events. Nothing is stored between two of them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias

from fastapi import Request, Response
from pydantic import Field, JsonValue, model_validator

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.openai.chat import NO_TOOLS
from llmserve.frontends.openai.ensembles import Values
from llmserve.frontends.openai.event_stream import EventStream, Template, json_answer, json_string, named_event
from llmserve.frontends.openai.fields import MAX_TOKENS, JsonFormat, TextFormat, format_values, guide_values
from llmserve.frontends.openai.generation import Piece, Sampling, Usage, answers
from llmserve.frontends.openai.replies import LIMITS, new_id
from llmserve.frontends.openai.state import State
from llmserve.frontends.openai.validation import Strict, refused


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[Any, refused("annotations are not given to the model", [])] = None
    logprobs: Annotated[Any, refused("log probs are not given to the model", [])] = None


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText], Field(min_length=1)]
    id: str | None = None
    status: str | None = None
    phase: Annotated[Any, refused("phases are not given to the model")] = None

    def listed(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, JsonValue] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, refused("these models have no verbosity", "medium")] = None


Input: TypeAlias = str | Annotated[list[InputMessage], Field(min_length=1)]


class ResponseRequest(Strict):
    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = Field(None, description="A label; nothing depends on it.")
    safety_identifier: str | None = Field(None, description="A label; nothing depends on it.")
    prompt_cache_key: str | None = Field(None, description="A hint; prefixes are found without it.")
    parallel_tool_calls: bool | None = Field(None, description="Without tools there is nothing that it could change.")
    store: Annotated[Any, refused("nothing is stored here", False)] = None
    background: Annotated[Any, refused("nothing is stored here that could be fetched later", False)] = None
    previous_response_id: Annotated[Any, refused("nothing is stored here: send the conversation")] = None
    conversation: Annotated[Any, refused("nothing is stored here: send the conversation")] = None
    include: Annotated[Any, refused("nothing more can be included", [])] = None
    tools: Annotated[Any, refused(NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, refused(NO_TOOLS, "none", "auto")] = None
    max_tool_calls: Annotated[Any, refused(NO_TOOLS)] = None
    reasoning: Annotated[Any, refused("these models do not reason by request", {})] = None
    truncation: Annotated[Any, refused("only the chat format cuts", "disabled")] = None
    top_logprobs: Annotated[Any, refused("log probs are told by /v1/chat/completions", 0)] = None
    prompt: Annotated[Any, refused("there are no stored prompts here")] = None
    service_tier: Annotated[Any, refused("there is one tier of service", "auto", "default")] = None
    stream_options: Annotated[Any, refused("usage is always told", {}, {"include_obfuscation": False})] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.messages():
            raise ValueError("input is empty")
        return self

    def messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*opening, {"role": "user", "content": self.input}]
        return [*opening, *(message.listed() for message in self.input)]

    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_output_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            more=self._format_values(),
        )

    def _format_values(self) -> Values:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, SchemaFormat):
            return guide_values("json_schema", json.dumps(wanted.schema_))
        return format_values(wanted)


@dataclass(slots=True)
class _Reply:
    """The response object, as it grows."""

    body: ResponseRequest
    id: str = field(default_factory=lambda: new_id("resp", "_"))
    item_id: str = field(default_factory=lambda: new_id("msg", "_"))
    created: int = field(default_factory=lambda: int(time.time()))

    def document(self, text: str | None = None, reason: str = "", usage: Usage | None = None) -> dict[str, Json]:
        """Without a text it is in progress."""
        body = self.body
        is_cut = reason in LIMITS
        status = "in_progress" if text is None else "incomplete" if is_cut else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [] if text is None else [self.item(text, status)],
            "parallel_tool_calls": bool(body.parallel_tool_calls),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": _usage(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def item(self, text: str | None, status: str) -> Json:
        content = [] if text is None else [_part(text)]
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage | None) -> Json:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


@dataclass(frozen=True, slots=True)
class Responses:
    state: State

    async def create(self, body: ResponseRequest, request: Request) -> Response:
        """The answer to a text or a conversation."""
        ensemble = self.state.ensembles.find(body.model)
        prompt = await self.state.conversations.values(ensemble, body.messages())
        pieces = self.state.caller(request).pieces(ensemble, prompt, body.sampling(), streaming=bool(body.stream))
        reply = _Reply(body)
        if body.stream:
            return EventStream(_events(reply, pieces))
        (answer,) = await answers(pieces, 1)
        document = reply.document(answer.text, answer.finish_reason, answer.usage)
        return json_answer(document | ({"warning": answer.warning} if answer.warning else {}))


async def _events(reply: _Reply, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
    place: dict[str, Json] = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
    number, texts, last = 0, list[str](), Piece("")
    delta = Template(
        named_event,
        {"type": "response.output_text.delta", **place, "delta": Template.SLOT, "logprobs": [],
         "sequence_number": Template.SLOT},
    )  # fmt: skip
    async with aclosing(pieces):
        async for piece in pieces:
            if not number:
                for event in _opening(reply, place):
                    yield _numbered(event, number)
                    number += 1
            if piece.text:
                texts.append(piece.text)
                yield delta.filled(json_string(piece.text), str(number))
                number += 1
            last = piece
    for event in _closing(reply, place, "".join(texts), last):
        yield _numbered(event, number)
        number += 1


def _numbered(event: dict[str, Json], number: int) -> bytes:
    return named_event({**event, "sequence_number": number})


def _opening(reply: _Reply, place: dict[str, Json]) -> Sequence[dict[str, Json]]:
    return (
        {"type": "response.created", "response": reply.document()},
        {"type": "response.in_progress", "response": reply.document()},
        {"type": "response.output_item.added", "output_index": 0, "item": reply.item(None, "in_progress")},
        {"type": "response.content_part.added", **place, "part": _part("")},
    )


def _closing(reply: _Reply, place: dict[str, Json], text: str, last: Piece) -> Sequence[dict[str, Json]]:
    response = reply.document(text, last.finish_reason, last.usage)
    if last.warning:
        response["warning"] = last.warning
    status = response["status"]
    return (
        {"type": "response.output_text.done", **place, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **place, "part": _part(text)},
        {"type": "response.output_item.done", "output_index": 0, "item": reply.item(text, status)},
        {"type": f"response.{status}", "response": response},
    )
