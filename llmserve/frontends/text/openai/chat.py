"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from fastapi import Request, Response

from llmserve.at_once import at_once
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import EventStream, Template, json_answer, json_string
from llmserve.frontends.text.answers.generation import Answer, Caller, Piece, Sampling, Usage, answers, total_usage
from llmserve.frontends.text.answers.log_probs import (
    Scored,
    TokenBytes,
    TokenIds,
    chat_log_probs,
    scored_output,
    token_ids,
    with_itself,
    with_top,
)
from llmserve.frontends.text.answers.replies import (
    NOT_ASKED,
    NOTHING,
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
from llmserve.frontends.text.answers.spoken import Call, Prepared, Said, has_called, read_parts
from llmserve.frontends.text.openai.chat_fields import BatchChatRequest, ChatFields, ChatRequest
from llmserve.frontends.text.requests.ensembles import Ensemble
from llmserve.frontends.text.state import ApiState
from llmserve.stages.answer_parts import Part, PartKind, PartReader

OBJECT, CHUNK = "chat.completion", "chat.completion.chunk"


@dataclass(slots=True)
class _Conversation:
    """One conversation of a request, and its answers."""

    body: ChatRequest
    prepared: Prepared
    sampling: Sampling
    answers: Sequence[Answer] = ()
    said: Sequence[Said] = ()
    members: dict[str, Json] = field(default_factory=dict)  # requested members on the prompt's tokens

    @property
    def num_answers(self) -> int:
        return self.body.n or 1


@dataclass(frozen=True, slots=True)
class Chat:
    state: ApiState

    async def create(self, body: ChatRequest, request: Request) -> Response:
        """Generate the assistant's next message."""
        ensemble, caller = self._begun(body, request)
        talk = await self._prepared(ensemble, body)
        pieces = self._pieces(ensemble, caller, talk)
        if body.stream:
            return EventStream(self._events(body, ensemble, talk.prepared, pieces))
        talk.answers = await answers(pieces, talk.num_answers)
        return await self._reply(body, ensemble, caller, [talk])

    async def create_several(self, body: BatchChatRequest, request: Request) -> Response:
        """Generate the next message of several conversations. Each counts as a request."""
        ensemble, caller = self._begun(body, request)
        talks = [await self._prepared(ensemble, each) for each in body.requests()]

        async def run(talk: _Conversation) -> None:
            talk.answers = await answers(self._pieces(ensemble, caller, talk), talk.num_answers)

        await at_once(run, talks, caller.most_at_once(max(talk.num_answers for talk in talks)))
        return await self._reply(body, ensemble, caller, talks)

    def _begun(self, body: ChatFields, request: Request) -> tuple[Ensemble, Caller]:
        body.as_operator_has_it(self.state.settings)
        return self.state.ensembles.named(body), self.state.caller(request)

    async def _prepared(self, ensemble: Ensemble, body: ChatRequest) -> _Conversation:
        prepared = await self.state.conversations.prepared(ensemble, body.talk())
        prepared = replace(prepared, prompt=await self.state.cut_prompt(ensemble, prepared.prompt, body))
        more = {**body.values(), **prepared.guide, **await self.state.drafts(ensemble, body.predicted())}
        asked = body.sampling(body.max_completion_tokens or body.max_tokens, body.n or 1, more)
        return _Conversation(body, prepared, await self.state.sampling(ensemble, asked))

    def _pieces(self, ensemble: Ensemble, caller: Caller, talk: _Conversation) -> AsyncGenerator[Piece, None]:
        return caller.pieces(
            ensemble, talk.prepared.prompt, talk.sampling, streaming=bool(talk.body.stream),
            wants_tokens=talk.body.wants_tokens, counts_drafts=talk.body.wants_usage,
        )  # fmt: skip

    async def _reply(
        self, body: ChatFields, ensemble: Ensemble, caller: Caller, talks: Sequence[_Conversation]
    ) -> Response:
        for talk in talks:
            talk.said = [talk.prepared.said(answer.text) for answer in talk.answers]
            for answer, each in zip(talk.answers, talk.said, strict=True):
                thought = each.thought if talk.prepared.thinks else None
                answer.last.usage = await self.state.counted(ensemble, answer.last.usage, thought)
                each.text = talk.body.echoed() + each.text
        head = self._head(OBJECT, body, ensemble)
        if not body.wants_tokens:
            return json_answer(_document(head, body, talks, [], {}))
        for talk in talks:
            talk.members = await prompt_members(self.state, ensemble, talk.prepared.prompt, body, talk.answers)
        found = [answer for talk in talks for answer in talk.answers]
        return await scored_reply(
            self.state, caller, ensemble, found,
            lambda: [_scored(body, answer.pieces) for answer in found] if body.logprobs else [],
            lambda scored, texts: _document(head, body, talks, scored, texts),
        )  # fmt: skip

    def _head(self, kind: str, body: ChatFields, ensemble: Ensemble) -> dict[str, Json]:
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
                    if chunks.running is None:
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
    calls: list[Call] = field(default_factory=list)
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
        """`members` are next to the choices; `text` is the start of the message."""
        return self.chunks.chunk(self._delta({"role": "assistant", "content": text, "refusal": None}), members)

    def chunks_of(self, piece: Piece, told: Mapping[str, Json]) -> Iterator[bytes]:
        """`told`: members on all tokens of the piece, for its first chunk.

        If every chunk reports the usage, the last one also has the reason: vLLM's clients expect a new count in each.
        """
        parts = read_parts(self.reader, piece.text, is_last=bool(piece.finish_reason))
        if self.chunks.running is None:
            if told:
                first = parts.pop(0) if parts else Part(PartKind.TEXT, "")
                yield self.chunks.chunk({**self._delta(self._said(first)), **told})
            for part in parts:
                yield self._chunk(part)
            return
        deltas = [self._said(part) for part in parts] or [{}]
        choices = [{**self._delta(delta), **(told if place == 0 else {})} for place, delta in enumerate(deltas)]
        if piece.finish_reason:
            reason = finish_reason(piece.finish_reason, has_called=has_called(self.calls))
            choices[-1] |= {"finish_reason": reason, **ending_fields(piece)}
        for place, choice in enumerate(choices, 1):
            is_last = piece.finish_reason and place == len(choices)
            yield self.chunks.chunk(choice, extra_fields(piece) if is_last else NOTHING)

    def _chunk(self, part: Part) -> bytes:
        if part.kind is PartKind.TEXT:
            return self.text.filled(json_string(part.text))
        if part.kind is PartKind.ARGUMENTS:
            self.calls[-1].pieces.append(part.text)
            return self.arguments.filled(str(len(self.calls) - 1), json_string(part.text))
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
            self.calls.append(Call(part.text))
            return {"tool_calls": [{"index": len(self.calls) - 1, **_call(self.calls[-1])}]}
        self.calls[-1].pieces.append(part.text)
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]}

    def ending(self, piece: Piece) -> bytes:
        reason = finish_reason(piece.finish_reason, has_called=has_called(self.calls))
        return self.chunks.chunk(self._delta({}, reason) | ending_fields(piece), extra_fields(piece))

    def _delta(self, delta: Json, reason: str | None = None) -> dict[str, Json]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _thought(text: str) -> dict[str, Json]:
    """A thought under DeepSeek's name, and under vLLM's current one."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: Call) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _scored(body: ChatFields, pieces: Sequence[Piece]) -> list[Scored]:
    tokens = (one for piece in pieces for one in scored_output(piece.arrays))
    return with_itself(tokens) if body.logprob_token_ids else with_top(tokens, body.top_logprobs)


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
    body: ChatFields,
    talks: Sequence[_Conversation],
    scored: Sequence[Sequence[Scored]],
    texts: TokenBytes,
) -> Json:
    """The answer. For several conversations, each choice has the members of its own prompt."""
    is_one = isinstance(body, ChatRequest)
    choices: list[dict[str, Json]] = []
    for talk in talks:
        for answer, said in zip(talk.answers, talk.said, strict=True):
            choices.append({
                "index": len(choices),
                "message": _message(said),
                "logprobs": None,
                "finish_reason": finish_reason(answer.last.finish_reason, has_called=has_called(said.calls)),
                "token_ids": token_ids(answer.pieces) if body.return_token_ids else None,
                **ending_fields(answer.last),
                **({} if is_one else NOT_ASKED | talk.members),
            })  # fmt: skip
    texts = TokenIds() if body.return_tokens_as_token_ids else texts
    for choice, tokens in zip(choices, scored, strict=False):
        choice["logprobs"] = _log_probs_document(tokens, texts)
    usage = usage_document(total_usage([talk.answers for talk in talks]))
    document = {**head, "choices": choices, "usage": usage}
    if is_one:
        document |= {**NOT_ASKED, **talks[0].members}
    return with_extras(document, (answer.last for talk in talks for answer in talk.answers))
