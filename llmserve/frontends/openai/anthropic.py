"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Request, Response
from pydantic import Field

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.openai.chat import NO_TOOLS
from llmserve.frontends.openai.ensembles import Ensemble, Values
from llmserve.frontends.openai.event_stream import EventStream, Template, json_answer, json_string, named_event
from llmserve.frontends.openai.fields import MAX_STOPS, MAX_TOKENS, StopText
from llmserve.frontends.openai.generation import Piece, Sampling, Usage, answers
from llmserve.frontends.openai.replies import LIMITS, new_id
from llmserve.frontends.openai.state import State
from llmserve.frontends.openai.validation import Strict, refused

NO_THINKING = "these models do not think by request"


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: Any = Field(None, description="A hint; prefixes are found without it.")
    citations: Annotated[Any, refused("citations are not given to the model", [])] = None


Blocks: TypeAlias = str | Annotated[list[TextBlock], Field(min_length=1)]


def _text(blocks: str | list[TextBlock]) -> str:
    return blocks if isinstance(blocks, str) else "".join(block.text for block in blocks)


class Turn(Strict):
    role: Literal["user", "assistant"]
    content: Blocks


class Metadata(Strict):
    user_id: str | None = None


class CountRequest(Strict):
    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: Blocks | None = None
    tools: Annotated[Any, refused(NO_TOOLS, [])] = None
    tool_choice: Annotated[Any, refused(NO_TOOLS, {"type": "none"}, {"type": "auto"})] = None
    thinking: Annotated[Any, refused(NO_THINKING, {"type": "disabled"})] = None
    cache_control: Any = Field(None, description="A hint; prefixes are found without it.")

    def listed(self) -> list[dict[str, str]]:
        opening = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return [*opening, *({"role": turn.role, "content": _text(turn.content)} for turn in self.messages)]


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Annotated[Any, refused("there is one tier of service", "auto", "standard_only")] = None
    container: Annotated[Any, refused("there are no containers here")] = None
    output_config: Annotated[Any, refused("formats are held by /v1/chat/completions", {})] = None
    speed: Annotated[Any, refused("there is one speed", "standard")] = None

    def sampling(self) -> Sampling:
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            stop=self.stop_sequences or (),
        )


@dataclass(frozen=True, slots=True)
class Messages:
    state: State

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        """The assistant's next message."""
        ensemble, prompt = await self._asked(body)
        pieces = self.state.caller(request).pieces(ensemble, prompt, body.sampling(), streaming=bool(body.stream))
        if body.stream:
            num_prompt = len(await self.state.ensembles.prompt_ids(ensemble, prompt))
            return EventStream(_events(body, pieces, num_prompt))
        (answer,) = await answers(pieces, 1)
        document = _message(body, [{"type": "text", "text": answer.text}], _usage(answer.usage))
        return json_answer(document | _ending(body, answer.finish_reason))

    async def count_tokens(self, body: CountRequest, request: Request) -> Response:
        """How many tokens a conversation is."""
        ensemble, prompt = await self._asked(body)
        return json_answer({"input_tokens": len(await self.state.ensembles.prompt_ids(ensemble, prompt))})

    async def _asked(self, body: CountRequest) -> tuple[Ensemble, Values]:
        ensemble = self.state.ensembles.find(body.model)
        return ensemble, await self.state.conversations.values(ensemble, body.listed())


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


def _ending(body: MessagesRequest, reason: str) -> dict[str, Json]:
    """Which of several stop sequences it was is not known."""
    if reason in LIMITS:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reason == "stop_words" and body.stop_sequences:
        only = body.stop_sequences[0] if len(body.stop_sequences) == 1 else None
        return {"stop_reason": "stop_sequence", "stop_sequence": only}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage | None) -> dict[str, Json]:
    """What was found in the cache counts apart."""
    usage = usage or Usage()
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }


async def _events(
    body: MessagesRequest, pieces: AsyncGenerator[Piece, None], num_prompt: int
) -> AsyncGenerator[bytes, None]:
    delta = Template(
        named_event,
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": Template.SLOT}},
    )
    has_begun, last = False, Piece("")
    async with aclosing(pieces):
        async for piece in pieces:
            if not has_begun:
                has_begun = True
                opening = _message(body, [], _usage(Usage(num_prompt)))
                yield named_event({"type": "message_start", "message": opening})
                block = {"type": "text", "text": ""}
                yield named_event({"type": "content_block_start", "index": 0, "content_block": block})
            if piece.text:
                yield delta.filled(json_string(piece.text))
            last = piece
    yield named_event({"type": "content_block_stop", "index": 0})
    ending = _ending(body, last.finish_reason)
    yield named_event({"type": "message_delta", "delta": ending, "usage": _usage(last.usage)})
    yield named_event({"type": "message_stop"})
