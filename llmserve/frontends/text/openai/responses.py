"""POST /v1/responses: answers a text or a conversation, whole or as typed events. Also serves stored responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request, Response

from llmserve.errors import Code
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import EventStream, Template, json_answer, json_string, named_event
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.answers.generation import Piece, Sampling, Usage, answers
from llmserve.frontends.text.answers.log_probs import chat_log_probs, scored_output
from llmserve.frontends.text.answers.replies import LIMITS, new_id
from llmserve.frontends.text.answers.spoken import Call, Prepared, read_parts
from llmserve.frontends.text.openai.background import FINAL, Background
from llmserve.frontends.text.openai.response_fields import ResponseRequest
from llmserve.frontends.text.openai.stored_responses import StoredResponse, StoredResponses
from llmserve.frontends.text.requests.ensembles import Ensemble
from llmserve.frontends.text.requests.messages import Messages
from llmserve.frontends.text.requests.notes import note
from llmserve.frontends.text.requests.validation import MOST_SHOWN
from llmserve.frontends.text.state import ApiState
from llmserve.stages.answer_parts import Part, PartKind

PREFIXES = {PartKind.TEXT: "msg", PartKind.THOUGHT: "rs", PartKind.CALL: "fc"}
DELTAS = {
    PartKind.TEXT: "response.output_text",
    PartKind.THOUGHT: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
}


NOT_STORED = "store: this server stores no responses"


class ResponseNotFound(Refused):
    """The response was never stored, is no longer stored, or belongs to another key."""

    code = Code.NOT_FOUND


@dataclass(slots=True)
class _Item:
    """One item of an answer: a message, a thought or a call."""

    kind: PartKind
    index: int
    name: str = ""  # of a called tool
    id: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    log_probs: list[Json] = field(default_factory=list)  # of a message, if requested

    def __post_init__(self) -> None:
        self.id = new_id(PREFIXES[self.kind], "_")
        if self.kind is PartKind.CALL:
            self.call_id = new_id("call", "_")

    @property
    def is_complete(self) -> bool:
        """False for a call whose arguments were cut off, or are not an object."""
        return self.kind is not PartKind.CALL or Call(self.name, pieces=self.texts).value is not None

    def call(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.texts)}
        return {"id": self.call_id, "type": "function", "function": function}

    @property
    def place(self) -> dict[str, Json]:
        content: dict[str, Json] = {} if self.kind is PartKind.CALL else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.index, **content}

    def document(self, status: str) -> dict[str, Json]:
        text, has_begun = "".join(self.texts), status != "in_progress"
        if status == "completed" and not self.is_complete:
            status = "incomplete"
        head: dict[str, Json] = {"id": self.id, "status": status}
        if self.kind is PartKind.CALL:
            call = {"call_id": self.call_id, "name": self.name, "arguments": text}
            return {"type": "function_call", **head, **call}
        content = [self._part(text)] if has_begun else []
        if self.kind is PartKind.THOUGHT:
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def delta(self) -> Template:
        log_probs: dict[str, Json] = {"logprobs": []} if self.kind is PartKind.TEXT else {}
        event = {"type": f"{DELTAS[self.kind]}.delta", **self.place, "delta": Template.SLOT, **log_probs}
        return Template(named_event, {**event, "sequence_number": Template.SLOT})

    def scored_delta(self, text: str, log_probs: list[Json]) -> dict[str, Json]:
        self.log_probs += log_probs
        return {"type": f"{DELTAS[self.kind]}.delta", **self.place, "delta": text, "logprobs": log_probs}

    def opening(self) -> Iterator[dict[str, Json]]:
        added = {"output_index": self.index, "item": self.document("in_progress")}
        yield {"type": "response.output_item.added", **added}
        if self.kind is not PartKind.CALL:
            yield {"type": "response.content_part.added", **self.place, "part": self._part("")}

    def closing(self, status: str) -> Iterator[dict[str, Json]]:
        text = "".join(self.texts)
        if self.kind is PartKind.CALL:
            yield {"type": f"{DELTAS[self.kind]}.done", **self.place, "name": self.name, "arguments": text}
        else:
            log_probs: dict[str, Json] = {"logprobs": self.log_probs} if self.kind is PartKind.TEXT else {}
            yield {"type": f"{DELTAS[self.kind]}.done", **self.place, "text": text, **log_probs}
            yield {"type": "response.content_part.done", **self.place, "part": self._part(text)}
        done = {"output_index": self.index, "item": self.document(status)}
        yield {"type": "response.output_item.done", **done}

    def _part(self, text: str) -> Json:
        if self.kind is PartKind.THOUGHT:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.log_probs if text else []}


@dataclass(slots=True)
class _Reply:
    """The response object while it is generated."""

    body: ResponseRequest
    sampling: Sampling
    is_stored: bool
    id: str = field(default_factory=lambda: new_id("resp", "_"))
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[_Item] = field(default_factory=list)
    keep: Callable[[Mapping[str, Json]], None] = lambda document: None  # when it is complete

    def add(self, part: Part) -> bool:
        """Add a part. Returns whether it begins an item."""
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        begins = part.kind is PartKind.CALL or not self.items or self.items[-1].kind is not kind
        if begins:
            self.items.append(_Item(kind, len(self.items), part.text if kind is PartKind.CALL else ""))
        if part.kind is not PartKind.CALL:
            self.items[-1].texts.append(part.text)
        return begins

    @property
    def thought(self) -> str:
        return "".join(text for item in self.items if item.kind is PartKind.THOUGHT for text in item.texts)

    def message(self) -> dict[str, Any]:
        """The answer as a message, for continuing the conversation: without a call that was cut off."""
        text = "".join(each for item in self.items if item.kind is PartKind.TEXT for each in item.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.thought:
            message["reasoning_content"] = self.thought
        if calls := [item for item in self.items if item.kind is PartKind.CALL and item.is_complete]:
            message["tool_calls"] = [item.call() for item in calls]
        return message

    def document(self, status: str, usage: Usage | None = None) -> dict[str, Json]:
        body = self.body
        is_cut = status == "incomplete"
        effort = None if body.reasoning is None else body.reasoning.effort
        choice = body.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "background": bool(body.background),
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": [self._item(item, status) for item in self.items] if status in FINAL else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": self.is_stored,
            "temperature": 1.0 if self.sampling.temperature is None else self.sampling.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.document() for tool in body.tools or ()],
            "top_p": 1.0 if self.sampling.top_p is None else self.sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": _usage(usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _item(self, item: _Item, status: str) -> Json:
        """If the answer was cut off, then its last item was."""
        return item.document(status if item is self.items[-1] else "completed")


def _usage(usage: Usage | None) -> Json:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning or 0},
        "total_tokens": usage.prompt + usage.completion,
    }


@dataclass(frozen=True, slots=True)
class Responses:
    state: ApiState
    stored: StoredResponses
    background: Background

    async def create(self, body: ResponseRequest, request: Request) -> Response:
        """Generate a response to a text or a conversation."""
        ensemble = self.state.ensembles.named(body)
        owner = self.state.owner(request)
        before = self._before(owner, body.previous_response_id)
        if body.store and not self.stored.keeps and not note(NOT_STORED):
            raise Refused(NOT_STORED, "store")
        if body.background and (body.store is False or not self.stored.keeps):
            raise Refused("background can only be used when `store` is true, and the server stores responses",
                          "background")  # fmt: skip
        prepared = await self.state.conversations.prepared(ensemble, body.talk(before))
        sampling = await self.state.sampling(ensemble, body.sampling(prepared.guide))
        wanted = body.wants_log_probs
        pieces = self.state.caller(request).pieces(
            ensemble, prepared.prompt, sampling, streaming=bool(body.stream) or wanted, wants_tokens=wanted
        )
        is_stored = self.stored.keeps and body.store is not False
        reply = _Reply(body, sampling, is_stored)
        if is_stored:
            reply.keep = partial(self._keep, owner, reply, body.conversation_after(before))
        if body.stream:
            return EventStream(self._events(reply, ensemble, prepared, pieces))
        making = self._made(reply, ensemble, prepared, pieces)
        if body.background:
            return json_answer(self.background.begin(owner, reply.document, making, reply.keep))
        return json_answer(await making)

    async def _made(
        self, reply: _Reply, ensemble: Ensemble, prepared: Prepared, pieces: AsyncGenerator[Piece, None]
    ) -> Json:
        if reply.body.wants_log_probs:  # tokens can only be assigned to items as they arrive
            last = [event async for event in self._documents(reply, ensemble, prepared, pieces)][-1]
            assert isinstance(last, dict)
            return last["response"]
        (answer,) = await answers(pieces, 1)
        for part in prepared.parts(answer.text):
            reply.add(part)
        return await self._whole(reply, ensemble, answer.last)

    async def input_tokens(self, body: ResponseRequest, request: Request) -> Response:
        """Count the input tokens of a response without generating it."""
        ensemble = self.state.ensembles.named(body)
        before = self._before(self.state.owner(request), body.previous_response_id)
        prepared = await self.state.conversations.prepared(ensemble, body.talk(before))
        ids = await self.state.ensembles.prompt_ids(ensemble, prepared.prompt)
        return json_answer({"object": "response.input_tokens", "input_tokens": len(ids)})

    async def retrieve(self, response_id: str, request: Request) -> Response:
        """Fetch a stored or background response."""
        owner = self.state.owner(request)
        running = self.background.find(owner, response_id)
        return json_answer(running or dict(self._find(owner, response_id).document))

    async def cancel(self, response_id: str, request: Request) -> Response:
        """Cancel a background response."""
        owner = self.state.owner(request)
        await self.background.cancel(owner, response_id)
        found = self._find(owner, response_id).document
        if not found["background"]:
            raise Refused("Cannot cancel a synchronous response.", "response_id")
        return json_answer(dict(found))

    async def delete(self, response_id: str, request: Request) -> Response:
        """Delete a stored response."""
        owner = self.state.owner(request)
        await self.background.cancel(owner, response_id)
        self._find(owner, response_id)
        self.stored.delete(owner, response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    def _before(self, owner: str, response_id: str | None) -> Messages:
        if response_id is None:
            return ()
        if self.background.find(owner, response_id) is not None:
            raise Refused(f"the response '{response_id}' is not complete yet: try again later", "previous_response_id")
        try:
            found = self._find(owner, response_id)
        except ResponseNotFound as error:
            raise Refused(str(error), "previous_response_id", "previous_response_not_found") from None
        if (status := found.document["status"]) not in FINAL:
            raise Refused(f"the response '{response_id}' is {status}: it cannot be continued", "previous_response_id")
        return found.messages

    def _find(self, owner: str, response_id: str) -> StoredResponse:
        found = self.stored.find(owner, response_id)
        if found is None:
            problem = f"Response with id '{response_id[:MOST_SHOWN]}' not found: responses are kept up to an hour"
            raise ResponseNotFound(problem, "response_id")
        return found

    def _keep(self, owner: str, reply: _Reply, messages: Messages, document: Mapping[str, Json]) -> None:
        self.stored.put(owner, document, [*messages, reply.message()])

    async def _whole(self, reply: _Reply, ensemble: Ensemble, last: Piece) -> dict[str, Json]:
        if not reply.items:
            reply.add(Part(PartKind.TEXT, ""))
        usage = await self.state.counted(ensemble, last.usage, reply.thought)
        document = reply.document(_status(last), usage)
        document |= {"warning": last.warning} if last.warning else {}
        reply.keep(document)
        return document

    async def _events(
        self, reply: _Reply, ensemble: Ensemble, prepared: Prepared, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._documents(reply, ensemble, prepared, pieces)) as documents:
            async for event in documents:
                yield event if isinstance(event, bytes) else named_event(event)

    async def _documents(
        self, reply: _Reply, ensemble: Ensemble, prepared: Prepared, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[dict[str, Json] | bytes, None]:
        """Yields events; those that only add text are encoded."""
        reader, last, number = prepared.new_reader(), Piece(""), 0
        tokens: list[Json] = []  # not in an event yet
        delta: Template | None = None  # of the current item
        async with aclosing(pieces):
            async for piece in pieces:
                if not number:
                    for kind in ("response.created", "response.in_progress"):
                        yield _numbered({"type": kind, "response": reply.document("in_progress")}, number)
                        number += 1
                tokens += await self._log_probs(reply.body, ensemble, piece)
                for part in read_parts(reader, piece.text, is_last=bool(piece.finish_reason)):
                    for event in _between(reply, part):
                        yield _numbered(event, number)
                        number += 1
                        delta = None
                    if part.kind is PartKind.TEXT and tokens:
                        yield _numbered(reply.items[-1].scored_delta(part.text, tokens), number)
                        number, tokens = number + 1, []
                        continue
                    if part.kind is not PartKind.TEXT:
                        tokens = []
                    if part.kind is not PartKind.CALL:
                        delta = delta or reply.items[-1].delta()
                        yield delta.filled(json_string(part.text), str(number))
                        number += 1
                last = piece
        if tokens and reply.items and reply.items[-1].kind is PartKind.TEXT:  # tokens without text
            yield _numbered(reply.items[-1].scored_delta("", tokens), number)
            number += 1
        for event in await self._closing(reply, ensemble, last):
            yield _numbered(event, number)
            number += 1

    async def _log_probs(self, body: ResponseRequest, ensemble: Ensemble, piece: Piece) -> list[Json]:
        """The log probs of a piece's tokens; empty if not requested."""
        if not body.wants_log_probs:
            return []
        tokens = scored_output(piece.arrays)
        return chat_log_probs(tokens, await self.state.token_texts.of(ensemble, tokens))

    async def _closing(self, reply: _Reply, ensemble: Ensemble, last: Piece) -> list[dict[str, Json]]:
        opening = [] if reply.items else [*_between(reply, Part(PartKind.TEXT, ""))]
        status = _status(last)
        response = await self._whole(reply, ensemble, last)
        closing = reply.items[-1].closing(status)
        return [*opening, *closing, {"type": f"response.{status}", "response": response}]


def _between(reply: _Reply, part: Part) -> Iterator[dict[str, Json]]:
    """If a part begins an item, yields the events that end the previous item and begin this one."""
    if reply.add(part):
        if len(reply.items) > 1:
            yield from reply.items[-2].closing("completed")
        yield from reply.items[-1].opening()


def _status(last: Piece) -> str:
    return "incomplete" if last.finish_reason in LIMITS else "completed"


def _numbered(event: dict[str, Json], number: int) -> dict[str, Json]:
    return {**event, "sequence_number": number}
