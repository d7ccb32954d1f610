"""POST /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request, Response

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import EventStream, Template, json_answer, json_string, named_event
from llmserve.frontends.text.answers.generation import Piece, Usage, answers
from llmserve.frontends.text.answers.replies import LIMITS, new_id, with_extras
from llmserve.frontends.text.answers.spoken import Call, Prepared, Said, has_called, read_parts
from llmserve.frontends.text.anthropic.fields import CountRequest, MessagesRequest
from llmserve.frontends.text.requests.ensembles import Ensemble
from llmserve.frontends.text.state import ApiState
from llmserve.stages.answer_parts import Part, PartKind

DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.THOUGHT: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


@dataclass(frozen=True, slots=True)
class Messages:
    state: ApiState

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        """Generate the assistant's next message."""
        ensemble = self.state.ensembles.named(body)
        prepared = await self.state.conversations.prepared(ensemble, body.talk())
        pieces = self.state.caller(request).pieces(
            ensemble,
            prepared.prompt,
            await self.state.sampling(ensemble, body.sampling(prepared.guide)),
            streaming=bool(body.stream),
        )
        if body.stream:
            return EventStream(self._events(body, ensemble, prepared, pieces))
        (answer,) = await answers(pieces, 1)
        last, said, parts = answer.last, Said(), prepared.parts(answer.text)
        for part in parts:
            said.add(part)
        usage = await self.state.counted(ensemble, last.usage, said.thought if prepared.thinks else None)
        document = _message(body, _content(parts), _usage(usage))
        document |= _ending(body, last, has_called=has_called(said.calls))
        return json_answer(with_extras(document, [last]))

    async def count_tokens(self, body: CountRequest, request: Request) -> Response:
        """Count the tokens of a conversation."""
        ensemble = self.state.ensembles.named(body)
        prepared = await self.state.conversations.prepared(ensemble, body.talk())
        return json_answer({"input_tokens": await self._num_tokens(ensemble, prepared)})

    async def _num_tokens(self, ensemble: Ensemble, prepared: Prepared) -> int:
        return len(await self.state.ensembles.prompt_ids(ensemble, prepared.prompt))

    async def _events(
        self, body: MessagesRequest, ensemble: Ensemble, prepared: Prepared, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[bytes, None]:
        num_prompt = await self._num_tokens(ensemble, prepared)
        blocks, reader = _Blocks(), prepared.new_reader()
        last, has_begun = Piece(""), False
        async with aclosing(pieces):
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    opening = _message(body, [], _usage(Usage(num_prompt)))
                    yield named_event({"type": "message_start", "message": opening})
                    if reader is None:
                        yield blocks.begin(Part(PartKind.TEXT, ""))
                for part in read_parts(reader, piece.text, is_last=bool(piece.finish_reason)):
                    for event in blocks.events(part):
                        yield event
                last = piece
        for event in blocks.end():
            yield event
        usage = await self.state.counted(ensemble, last.usage, blocks.thought if prepared.thinks else None)
        ending = _ending(body, last, has_called=has_called(blocks.calls))
        delta: dict[str, Json] = {"type": "message_delta", "delta": ending, "usage": _usage(usage)}
        yield named_event(with_extras(delta, [last]))
        yield named_event({"type": "message_stop"})


class _Blocks:
    """The blocks of a streamed message."""

    def __init__(self) -> None:
        self._kind: PartKind | None = None  # of the current block
        self._index = -1
        self._template: Template | None = None
        self._thought: list[str] = []
        self.calls: list[Call] = []

    @property
    def thought(self) -> str:
        return "".join(self._thought)

    def events(self, part: Part) -> Iterator[bytes]:
        kind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        if part.kind is PartKind.CALL or kind is not self._kind:
            if self._kind is not None:
                yield self._stop()
            yield self.begin(part)
        if part.kind is PartKind.THOUGHT:
            self._thought.append(part.text)
        if part.kind is PartKind.ARGUMENTS:
            self.calls[-1].pieces.append(part.text)
        if part.kind is not PartKind.CALL:
            yield self.delta(part.text)

    def begin(self, part: Part) -> bytes:
        self._kind, self._template = part.kind, None
        self._index += 1
        if part.kind is PartKind.CALL:
            self.calls.append(Call(part.text))
        block = {"type": "content_block_start", "index": self._index, "content_block": _empty_block(part)}
        return named_event(block)

    def delta(self, text: str) -> bytes:
        if self._template is None:
            assert self._kind is not None
            kind, member = DELTAS[self._kind]
            delta = {"type": kind, member: Template.SLOT}
            event = {"type": "content_block_delta", "index": self._index, "delta": delta}
            self._template = Template(named_event, event)
        return self._template.filled(json_string(text))

    def end(self) -> Iterator[bytes]:
        """End the last block. A message has at least one."""
        if self._kind is None:
            yield self.begin(Part(PartKind.TEXT, ""))
        yield self._stop()

    def _stop(self) -> bytes:
        return named_event({"type": "content_block_stop", "index": self._index})


def _empty_block(part: Part) -> dict[str, Json]:
    if part.kind is PartKind.CALL:
        return _tool_use(part.text, {})
    if part.kind is PartKind.THOUGHT:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _tool_use(name: str, arguments: Json) -> dict[str, Json]:
    return {"type": "tool_use", "id": new_id("toolu", "_"), "name": name, "input": arguments}


def _content(parts: Sequence[Part]) -> list[Json]:
    """The blocks of an answer in order, without a call that was cut off."""
    runs: list[tuple[Part, list[str]]] = []  # the first part of each block, and its text or arguments
    for part in parts:
        kind: PartKind = PartKind.CALL if part.kind is PartKind.ARGUMENTS else part.kind
        if part.kind is PartKind.CALL or not runs or runs[-1][0].kind is not kind:
            runs.append((part, []))
        if part.kind is not PartKind.CALL:
            runs[-1][1].append(part.text)
    blocks: list[Json] = []
    for first, texts in runs:
        if first.kind is not PartKind.CALL:
            blocks.append(_empty_block(first) | {DELTAS[first.kind][1]: "".join(texts)})
        elif (arguments := Call(first.text, pieces=texts).value) is not None:
            blocks.append(_tool_use(first.text, arguments))
    return blocks or [_empty_block(Part(PartKind.TEXT, ""))]


def _message(body: MessagesRequest, content: list[Json], usage: Json) -> dict[str, Json]:
    return {
        "id": new_id("msg", "_"),
        "type": "message",
        "role": "assistant",
        "model": body.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _ending(body: MessagesRequest, last: Piece, *, has_called: bool) -> dict[str, Json]:
    if last.finish_reason in LIMITS:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if last.stop_word and body.stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_word}
    if last.finish_reason == "stop_words" and body.stop_sequences:  # the ensemble does not report which
        only = body.stop_sequences[0] if len(body.stop_sequences) == 1 else None
        return {"stop_reason": "stop_sequence", "stop_sequence": only}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage | None) -> dict[str, Json]:
    """The usage in Anthropic's format, which counts cached tokens separately."""
    usage = usage or Usage()
    thought = usage.reasoning
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
        **({} if thought is None else {"output_tokens_details": {"thinking_tokens": thought}}),
    }
