"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request, Response

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import EventStream, Template, json_answer, json_string
from llmserve.frontends.text.answers.generation import Answer, Caller, Piece, Usage, answers, total_usage
from llmserve.frontends.text.answers.log_probs import (
    Scored,
    TokenBytes,
    TokenIds,
    chat_log_probs,
    scored_output,
    token_ids,
    with_top,
)
from llmserve.frontends.text.answers.replies import (
    Chunks,
    document_head,
    ending_fields,
    extra_fields,
    finish_reason,
    prompt_members,
    scored_reply,
    usage_document,
    with_extras,
)
from llmserve.frontends.text.answers.spoken import Call, Prepared, Said, read_parts
from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.requests.ensembles import Ensemble
from llmserve.frontends.text.state import ApiState
from llmserve.stages.answer_parts import Part, PartKind, PartReader

OBJECT, CHUNK = "chat.completion", "chat.completion.chunk"


@dataclass(frozen=True, slots=True)
class Chat:
    state: ApiState

    async def create(self, body: ChatRequest, request: Request) -> Response:
        """The assistant's next message."""
        ensemble = self.state.ensembles.named(body)
        caller = self.state.caller(request)
        prepared = await self.state.conversations.prepared(ensemble, body.talk())
        num_answers = body.n or 1
        more = {**body.values(), **prepared.guide, **await self.state.drafts(ensemble, body.predicted())}
        asked = body.sampling(body.max_completion_tokens or body.max_tokens, num_answers, more)
        sampling = await self.state.sampling(ensemble, asked)
        pieces = caller.pieces(
            ensemble, prepared.prompt, sampling, streaming=bool(body.stream), wants_tokens=body.wants_tokens,
            counts_drafts=body.wants_usage,
        )  # fmt: skip
        if body.stream:
            return EventStream(self._events(body, ensemble, prepared, pieces))
        return await self._reply(body, ensemble, caller, prepared, await answers(pieces, num_answers))

    async def _reply(
        self, body: ChatRequest, ensemble: Ensemble, caller: Caller, prepared: Prepared, found: Sequence[Answer]
    ) -> Response:
        said = [prepared.said(answer.text) for answer in found]
        for answer, each in zip(found, said, strict=True):
            last = answer.last
            last.usage = await self.state.counted(ensemble, last.usage, each.thought if prepared.thinks else None)
            each.text = body.echoed() + each.text
        head = self._head(OBJECT, body, ensemble)
        if not body.wants_tokens:
            return json_answer(_document(head, body, found, said, [], {}))
        head |= await prompt_members(self.state, ensemble, prepared.prompt, body, found)
        return await scored_reply(
            self.state, caller, ensemble, found,
            lambda: [_scored(body, answer.pieces) for answer in found] if body.logprobs else [],
            lambda scored, texts: _document(head, body, found, said, scored, texts),
        )  # fmt: skip

    def _head(self, kind: str, body: ChatRequest, ensemble: Ensemble) -> dict[str, Json]:
        return document_head("chatcmpl", kind, body.model, self.state.ensembles.fingerprint(ensemble))

    async def _events(
        self, body: ChatRequest, ensemble: Ensemble, prepared: Prepared, pieces: AsyncGenerator[Piece, None]
    ) -> AsyncGenerator[bytes, None]:
        members = await prompt_members(self.state, ensemble, prepared.prompt, body)
        chunks = Chunks(self._head(CHUNK, body, ensemble), body.wants_usage)
        if body.tells_usage:
            chunks.running = Usage(prompt=await self.state.ensembles.num_ids(ensemble, prepared.prompt))
        choices = [_Choice(chunks, index, prepared.new_reader()) for index in range(body.n or 1)]
        has_begun = False
        async with aclosing(pieces):
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    for choice in choices:
                        yield choice.opening(members, body.echoed())
                choice = choices[piece.index]
                if choice.reader is None and not body.wants_tokens:
                    if piece.text:
                        yield choice.text.filled(json_string(piece.text))
                else:
                    chunks.grow(piece)
                    told = {"token_ids": token_ids([piece])} if body.return_token_ids else {}
                    if body.logprobs:
                        told["logprobs"] = await self._log_probs(body, ensemble, piece)
                    for chunk in choice.chunks_of(piece, told):
                        yield chunk
                if piece.finish_reason:
                    yield choice.ending(piece)
                    thought = "".join(choice.thought) if prepared.thinks and body.wants_usage else None
                    piece.usage = await self.state.counted(ensemble, piece.usage, thought)
                    chunks.count(piece)
        for chunk in chunks.end():
            yield chunk

    async def _log_probs(self, body: ChatRequest, ensemble: Ensemble, piece: Piece) -> Json:
        tokens = _scored(body, [piece])
        if body.return_tokens_as_token_ids:
            return _log_probs_document(tokens, TokenIds())
        return _log_probs_document(tokens, await self.state.token_texts.of(ensemble, tokens))


@dataclass(slots=True)
class _Choice:
    """One streamed answer."""

    chunks: Chunks
    index: int
    reader: PartReader | None
    num_calls: int = 0
    thought: list[str] = field(default_factory=list)
    text: Template = field(init=False)
    thoughts: Template = field(init=False)
    arguments: Template = field(init=False)

    def __post_init__(self) -> None:
        slot = Template.SLOT
        self.text = self.chunks.template(self._delta({"content": slot}))
        if self.reader is not None:
            self.thoughts = self.chunks.template(self._delta(_thought(slot)))
            call: Json = {"index": slot, "function": {"arguments": slot}}
            self.arguments = self.chunks.template(self._delta({"tool_calls": [call]}))

    def opening(self, members: Mapping[str, Json], text: str) -> bytes:
        """`members`: beside the choices. `text`: with which the message begins."""
        return self.chunks.chunk(self._delta({"role": "assistant", "content": text, "refusal": None}), members)

    def chunks_of(self, piece: Piece, told: Mapping[str, Json]) -> Iterator[bytes]:
        """`told`: of all tokens of the piece, which the first chunk has."""
        parts = read_parts(self.reader, piece.text, is_last=bool(piece.finish_reason))
        if told:
            first = parts.pop(0) if parts else Part(PartKind.TEXT, "")
            yield self.chunks.chunk({**self._delta(self._said(first)), **told})
        for part in parts:
            yield self._chunk(part) if self.chunks.running is None else self.chunks.chunk(self._delta(self._said(part)))

    def _chunk(self, part: Part) -> bytes:
        if part.kind is PartKind.TEXT:
            return self.text.filled(json_string(part.text))
        if part.kind is PartKind.ARGUMENTS:
            return self.arguments.filled(str(self.num_calls - 1), json_string(part.text))
        if part.kind is PartKind.THOUGHT:
            self.thought.append(part.text)
            return self.thoughts.filled(*[json_string(part.text)] * 2)
        return self.chunks.chunk(self._delta(self._said(part)))

    def _said(self, part: Part) -> dict[str, Json]:
        if part.kind is PartKind.TEXT:
            return {"content": part.text}
        if part.kind is PartKind.THOUGHT:
            self.thought.append(part.text)
            return _thought(part.text)
        if part.kind is PartKind.CALL:
            self.num_calls += 1
            return {"tool_calls": [{"index": self.num_calls - 1, **_call(Call(part.text))}]}
        return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": part.text}}]}

    def ending(self, piece: Piece) -> bytes:
        reason = finish_reason(piece.finish_reason, has_called=self.num_calls > 0)
        return self.chunks.chunk(self._delta({}, reason) | ending_fields(piece), extra_fields(piece))

    def _delta(self, delta: Json, reason: str | None = None) -> dict[str, Json]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _thought(text: str) -> dict[str, Json]:
    """By DeepSeek's name for it, and by the one that vLLM has now."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _scored(body: ChatRequest, pieces: Sequence[Piece]) -> list[Scored]:
    return with_top((one for piece in pieces for one in scored_output(piece.arrays)), body.top_logprobs)


def _log_probs_document(tokens: Sequence[Scored], texts: TokenBytes) -> Json:
    return {"content": chat_log_probs(tokens, texts), "refusal": None}


def _message(said: Said) -> Json:
    message: dict[str, Json] = {"role": "assistant", "content": said.text, "refusal": None}
    if said.calls:
        message["content"] = said.text or None
        message["tool_calls"] = [_call(call) for call in said.calls]
    return message | (_thought(said.thought) if said.thought else {})


def _document(
    head: Mapping[str, Json],
    body: ChatRequest,
    found: Sequence[Answer],
    said: Sequence[Said],
    scored: Sequence[Sequence[Scored]],
    texts: TokenBytes,
) -> Json:
    choices: list[dict[str, Json]] = [
        {
            "index": index,
            "message": _message(each),
            "logprobs": None,
            "finish_reason": finish_reason(answer.last.finish_reason, has_called=bool(each.calls)),
            **ending_fields(answer.last),
            **({"token_ids": token_ids(answer.pieces)} if body.return_token_ids else {}),
        }
        for index, (answer, each) in enumerate(zip(found, said, strict=True))
    ]
    texts = TokenIds() if body.return_tokens_as_token_ids else texts
    for choice, tokens in zip(choices, scored, strict=False):
        choice["logprobs"] = _log_probs_document(tokens, texts)
    document = {**head, "choices": choices, "usage": usage_document(total_usage([found]))}
    return with_extras(document, (answer.last for answer in found))
