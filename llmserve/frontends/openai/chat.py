"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self, TypeAlias

from fastapi import Request, Response
from pydantic import Field, model_validator

from llmserve.frontends.http.error_answers import JSON
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.openai.ensembles import Ensemble, Values
from llmserve.frontends.openai.event_stream import (
    DONE,
    EventStream,
    Template,
    data,
    encoded_slowly,
    json_answer,
    json_string,
)
from llmserve.frontends.openai.fields import MAX_TOKENS, MAX_TOP, Sampled, TemplateValues
from llmserve.frontends.openai.generation import Answer, Caller, Piece, Usage, answers, total_usage
from llmserve.frontends.openai.log_probs import Scored, TokenBytes, chat_log_probs, log_prob_values, scored_output
from llmserve.frontends.openai.replies import finish_reason, new_id, usage_document
from llmserve.frontends.openai.state import State
from llmserve.frontends.openai.validation import Strict, refused

OBJECT, CHUNK = "chat.completion", "chat.completion.chunk"
NO_TOOLS = "tools are not supported: leave them out"


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content: TypeAlias = str | Annotated[list[TextPart], Field(min_length=1)]


class _Message(Strict):
    role: str
    content: Content
    name: Annotated[Any, refused("names of speakers are not given to the model")] = None

    def listed(self) -> dict[str, str]:
        """For the chat format, which knows no developers."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class SystemMessage(_Message):
    role: Literal["system", "developer"]


class UserMessage(_Message):
    role: Literal["user"]


class AssistantMessage(_Message):
    role: Literal["assistant"]
    refusal: Annotated[Any, refused("refusals are not given to the model")] = None
    audio: Annotated[Any, refused("there is no audio here")] = None
    tool_calls: Annotated[Any, refused(NO_TOOLS, [])] = None
    function_call: Annotated[Any, refused(NO_TOOLS)] = None


Message: TypeAlias = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class ChatRequest(Sampled):
    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    chat_template_kwargs: TemplateValues | None = None
    tools: Annotated[Any, refused(NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, refused(NO_TOOLS, "none", "auto")] = None
    functions: Annotated[Any, refused(NO_TOOLS, [])] = None
    function_call: Annotated[Any, refused(NO_TOOLS, "none", "auto")] = None
    parallel_tool_calls: bool | None = Field(None, description="Without tools there is nothing that it could change.")
    modalities: Annotated[Any, refused("there is only text here", ["text"])] = None
    audio: Annotated[Any, refused("there is only text here")] = None
    prediction: Annotated[Any, refused("predicted outputs are not supported")] = None
    reasoning_effort: Annotated[Any, refused("these models do not reason by request", "none")] = None
    verbosity: Annotated[Any, refused("these models have no verbosity", "medium")] = None
    web_search_options: Annotated[Any, refused("there is no web search here")] = None
    store: Annotated[Any, refused("nothing is stored here", False)] = None
    service_tier: Annotated[Any, refused("there is one tier of service", "auto", "default")] = None
    metadata: dict[str, str] | None = Field(None, description="Labels of what is stored; nothing is.")
    safety_identifier: str | None = Field(None, description="A label; nothing depends on it.")
    prompt_cache_key: str | None = Field(None, description="A hint; prefixes are found without it.")

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same, but differ")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream")
        return self

    def listed(self) -> list[dict[str, str]]:
        return [message.listed() for message in self.messages]

    def values(self) -> Values:
        """Of log probs."""
        return log_prob_values(self.top_logprobs or 0) if self.logprobs else {}


@dataclass(frozen=True, slots=True)
class Chat:
    state: State

    async def create(self, body: ChatRequest, request: Request) -> Response:
        """The assistant's next message."""
        ensemble = self.state.ensembles.find(body.model)
        caller = self.state.caller(request)
        prompt = await self.state.conversations.values(ensemble, body.listed(), body.chat_template_kwargs)
        num_answers = body.n or 1
        sampling = body.sampling(body.max_completion_tokens or body.max_tokens, num_answers, body.values())
        pieces = caller.pieces(
            ensemble, prompt, sampling, streaming=bool(body.stream), wants_tokens=bool(body.logprobs)
        )
        if body.stream:
            return EventStream(self._events(body, ensemble, pieces, num_answers))
        return await self._reply(body, ensemble, caller, await answers(pieces, num_answers))

    async def _reply(self, body: ChatRequest, ensemble: Ensemble, caller: Caller, found: Sequence[Answer]) -> Response:
        if not body.logprobs:
            return json_answer(_document(body, found, [], {}))
        scored = await caller.beside_loop(lambda: [_scored(answer.pieces) for answer in found], found)
        texts = await self.state.token_texts.of(ensemble, (one for tokens in scored for one in tokens))
        content = await caller.beside_loop(lambda: encoded_slowly(_document(body, found, scored, texts)), found)
        return Response(content, media_type=JSON)

    async def _events(
        self, body: ChatRequest, ensemble: Ensemble, pieces: AsyncGenerator[Piece, None], num_answers: int
    ) -> AsyncGenerator[bytes, None]:
        head: dict[str, Json] = {
            "id": new_id("chatcmpl"), "object": CHUNK, "created": int(time.time()), "model": body.model,
        }  # fmt: skip
        rest: dict[str, Json] = {"usage": None} if body.wants_usage else {}
        templates = [
            Template(data, {**head, "choices": [_delta({"content": Template.SLOT}, index)], **rest})
            for index in range(num_answers)
        ]
        total: Usage | None = Usage()
        has_begun = False
        async with aclosing(pieces):
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    opening: Any = {"role": "assistant", "content": "", "refusal": None}
                    for index in range(num_answers):
                        yield data({**head, "choices": [_delta(opening, index)], **rest})
                if body.logprobs:
                    choice = _delta({"content": piece.text}, piece.index)
                    choice["logprobs"] = await self._log_probs(ensemble, piece)
                    yield data({**head, "choices": [choice], **rest})
                elif piece.text:
                    yield templates[piece.index].filled(json_string(piece.text))
                if piece.finish_reason:
                    warned: dict[str, Json] = {"warning": piece.warning} if piece.warning else {}
                    ending = _delta({}, piece.index, finish_reason(piece.finish_reason))
                    yield data({**head, "choices": [ending], **rest, **warned})
                    total = _added(total, piece)
        if body.wants_usage:
            yield data({**head, "choices": [], "usage": usage_document(total)})
        yield DONE

    async def _log_probs(self, ensemble: Ensemble, piece: Piece) -> Json:
        tokens = _scored([piece])
        return _log_probs_document(tokens, await self.state.token_texts.of(ensemble, tokens))


def _scored(pieces: Sequence[Piece]) -> list[Scored]:
    return [one for piece in pieces for one in scored_output(piece.arrays)]


def _log_probs_document(tokens: Sequence[Scored], texts: TokenBytes) -> Json:
    return {"content": chat_log_probs(tokens, texts), "refusal": None}


def _document(
    body: ChatRequest, found: Sequence[Answer], scored: Sequence[Sequence[Scored]], texts: TokenBytes
) -> Json:
    choices: list[dict[str, Json]] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None,
            "finish_reason": finish_reason(answer.finish_reason),
        }
        for index, answer in enumerate(found)
    ]
    for choice, tokens in zip(choices, scored, strict=False):
        choice["logprobs"] = _log_probs_document(tokens, texts)
    document: dict[str, Json] = {
        "id": new_id("chatcmpl"),
        "object": OBJECT,
        "created": int(time.time()),
        "model": body.model,
        "choices": choices,
        "usage": usage_document(total_usage([found])),
    }
    warning = next((answer.warning for answer in found if answer.warning), "")
    return document | ({"warning": warning} if warning else {})


def _added(total: Usage | None, piece: Piece) -> Usage | None:
    if total is None or piece.usage is None:
        return None
    return total + (piece.usage if piece.index == 0 else replace(piece.usage, prompt=0, cached=0))


def _delta(delta: dict[str, Json], index: int, reason: str | None = None) -> dict[str, Json]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
