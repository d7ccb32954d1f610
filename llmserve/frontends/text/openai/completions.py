"""POST /v1/completions: completes texts or token ids, one or several; with log probs of both for evaluations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self, TypeAlias

from fastapi import Request, Response
from pydantic import Field, model_validator

from llmserve.at_once import at_once
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import EventStream, Template, json_answer, json_string
from llmserve.frontends.text.answers.generation import Answer, Caller, Piece, Sampling, Usage, answers, total_usage
from llmserve.frontends.text.answers.log_probs import (
    Scored,
    TextOffsets,
    TokenBytes,
    TokenIds,
    completion_log_probs,
    log_prob_values,
    scored_output,
    scored_prompt,
    token_ids,
    with_top,
)
from llmserve.frontends.text.answers.merging import merged
from llmserve.frontends.text.answers.replies import (
    NOT_ASKED,
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
from llmserve.frontends.text.requests.ensembles import Ensemble, Values
from llmserve.frontends.text.requests.fields import (
    MAX_ANSWERS,
    MAX_PROMPTS,
    MAX_TOKENS,
    MAX_TOP,
    MINUS_ONE_IS_NONE,
    ModelName,
    Sampled,
)
from llmserve.frontends.text.requests.validation import refused
from llmserve.frontends.text.state import ApiState

OBJECT = "text_completion"
DEFAULT_TOKENS = 16  # OpenAI's default

Ids: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]
Texts: TypeAlias = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
IdLists: TypeAlias = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionRequest(Sampled):
    model: ModelName = ""
    prompt: str | Texts | Ids | IdLists = Field(description="A text, token ids, or a list of either.")
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None, MINUS_ONE_IS_NONE] = DEFAULT_TOKENS
    best_of: Annotated[int | None, Field(ge=1, le=MAX_ANSWERS, description="Answers to choose the n best from.")] = None
    echo: bool | None = Field(None, description="Repeat the prompt before the answer.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = Field(None, description="Alternatives per token.")
    add_special_tokens: bool | None = Field(None, description="Default: as the model is configured.")
    suffix: Annotated[Any, refused("fill-in-the-middle models are not supported", "")] = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.num_drawn < (self.n or 1):
            raise ValueError("best_of must be at least n")
        if self.stream and self.num_drawn > (self.n or 1):
            raise ValueError("best_of above n cannot be streamed: the best answers are known only at the end")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens of 0 requires echo: the answer would be empty")
        if self.logprob_token_ids and (self.logprobs is None or self.max_tokens == 0):
            raise ValueError("logprob_token_ids require logprobs, and max_tokens above 0")
        if self.max_tokens == 0 and self.return_receipt:
            raise ValueError("return_receipt requires max_tokens above 0")
        if self.kv_transfer_params is not None and len(self.prompts()) > 1:
            raise ValueError("kv_transfer_params supports only one prompt")
        if self.echo and (self.truncate_prompt_tokens or self.kv_transfer_params):
            raise ValueError("echo returns the prompt unchanged: leave out fields that change its tokens")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream")
        return self

    @property
    def num_drawn(self) -> int:
        return self.best_of or self.n or 1

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


@dataclass(slots=True)
class _Prompt:
    """One prompt of a request, and its answers."""

    values: Values
    text: str = ""  # to echo
    ids: Sequence[int] = ()  # if its log probs are requested
    answers: list[Answer] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)  # of a streamed echo, once they are known
    waiting: list[Piece] = field(default_factory=list)  # pieces that wait for the scores
    members: dict[str, Json] = field(default_factory=dict)  # requested members on its tokens, for its choices

    def ready(self, piece: Piece) -> list[Piece]:
        """For a stream whose echo has log probs: the pieces to send; none until the prompt's log probs are known."""
        if self.scores:
            return [piece]
        self.waiting.append(piece)
        found = piece.arrays.get("prompt_log_probs")
        is_last_chance = piece.index == 0 and bool(piece.finish_reason)
        if not is_last_chance and (found is None or found.size != len(self.ids) - 1):
            return []
        self.scores = scored_prompt([one.arrays for one in self.waiting], self.ids)
        pieces, self.waiting = self.waiting, []
        return pieces


@dataclass(frozen=True, slots=True)
class Completions:
    state: ApiState

    async def create(self, body: CompletionRequest, request: Request) -> Response:
        """Generate a continuation of the prompt."""
        ensemble = self.state.ensembles.named(body)
        body.as_operator_has_it(self.state.settings)
        caller = self.state.caller(request)
        sampling = await self.state.sampling(ensemble, self._sampling(body))
        prompts = [
            _Prompt(await self.state.cut_prompt(ensemble, _prompt_values(prompt, body), body))
            for prompt in body.prompts()
        ]
        if body.echo:
            for prompt, given in zip(prompts, body.prompts(), strict=True):
                await self._prepare_echo(ensemble, prompt, given, of_ids=body.logprobs is not None)
        if body.stream:
            return EventStream(self._events(body, ensemble, caller, prompts, sampling))
        wants_tokens = self._wants_tokens(body)

        async def run(prompt: _Prompt) -> None:
            pieces = caller.pieces(ensemble, prompt.values, sampling, streaming=False, wants_tokens=wants_tokens)
            prompt.answers = await answers(pieces, sampling.num_answers)

        await at_once(run, prompts, caller.most_at_once(sampling.num_answers))
        return await self._reply(body, ensemble, caller, prompts)

    async def _reply(
        self, body: CompletionRequest, ensemble: Ensemble, caller: Caller, prompts: Sequence[_Prompt]
    ) -> Response:
        head = self._head(body, ensemble)
        if not self._wants_tokens(body):
            return json_answer(_document(head, body, prompts, [], {}))
        for prompt in prompts:
            prompt.members = await prompt_members(self.state, ensemble, prompt.values, body, prompt.answers)
        found = [answer for prompt in prompts for answer in prompt.answers]
        return await scored_reply(
            self.state, caller, ensemble, found,
            lambda: [] if body.logprobs is None else [*_scored(body, prompts)],
            lambda scored, texts: _document(head, body, prompts, scored, texts),
        )  # fmt: skip

    def _head(self, body: CompletionRequest, ensemble: Ensemble) -> dict[str, Json]:
        return document_head("cmpl", OBJECT, body.model, self.state.ensembles.fingerprint(ensemble))

    def _sampling(self, body: CompletionRequest) -> Sampling:
        more: Values = {}
        if body.logprobs is not None or body.prompt_logprobs is not None:
            of_prompt = bool(body.echo) or body.prompt_logprobs is not None
            num_top = 0 if body.logprob_token_ids else max(body.logprobs or 0, body.prompt_logprobs or 0)
            more = log_prob_values(num_top, of_prompt=of_prompt)
        elif body.num_drawn > (body.n or 1):
            more = {"return_log_probs": [True]}
        max_tokens = None if body.max_tokens is None else max(body.max_tokens, 1)  # a token that is not returned
        return body.sampling(max_tokens, body.num_drawn, more)

    @staticmethod
    def _wants_tokens(body: CompletionRequest) -> bool:
        return body.logprobs is not None or body.num_drawn > (body.n or 1) or body.tells_tokens

    async def _prepare_echo(self, ensemble: Ensemble, prompt: _Prompt, given: str | list[int], *, of_ids: bool) -> None:
        ensembles = self.state.ensembles
        if isinstance(given, str):
            prompt.text = given
            if of_ids:
                prompt.ids = await ensembles.prompt_ids(ensemble, prompt.values)
                prompt.values = {"prompt_ids": prompt.ids}
        else:
            prompt.ids, prompt.text = given, await ensembles.text_of(ensemble, given)

    async def _events(
        self,
        body: CompletionRequest,
        ensemble: Ensemble,
        caller: Caller,
        prompts: Sequence[_Prompt],
        sampling: Sampling,
    ) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._head(body, ensemble), body.wants_usage)
        wants_tokens = self._wants_tokens(body)
        if body.tells_usage:
            counts = [await self.state.ensembles.num_ids(ensemble, prompt.values) for prompt in prompts]
            chunks.running = Usage(prompt=sum(counts))
        members = [await prompt_members(self.state, ensemble, prompt.values, body) for prompt in prompts]
        num_answers = sampling.num_answers
        templates = [chunks.template(_choice(Template.SLOT, index)) for index in range(len(prompts) * num_answers)]
        offsets = [TextOffsets() for _ in templates]
        to_echo = set(range(len(templates))) if body.echo else set()
        streams = [
            caller.pieces(
                ensemble, prompt.values, sampling, streaming=True, wants_tokens=wants_tokens,
                counts_drafts=body.wants_usage,
            )
            for prompt in prompts
        ]  # fmt: skip
        async with aclosing(merged(streams, caller.most_at_once(num_answers))) as pieces:
            async for place, found in pieces:
                prompt = prompts[place]
                for piece in prompt.ready(found) if body.echo and body.logprobs is not None else (found,):
                    index = place * num_answers + piece.index
                    if index in to_echo:
                        to_echo.remove(index)
                        choice = _choice(prompt.text, index)
                        if body.logprobs is not None:
                            choice["logprobs"] = await self._log_probs(body, ensemble, prompt.scores, offsets[index])
                        yield chunks.chunk(choice)
                    if body.max_tokens == 0:
                        piece.text, piece.arrays = "", {}
                    if not piece.finish_reason and not wants_tokens:
                        if piece.text:
                            yield templates[index].filled(json_string(piece.text))
                        continue
                    choice = _choice(piece.text, index, _reason(body, piece.finish_reason)) | members[place]
                    members[place] = {}  # they are sent once
                    chunks.grow(piece)
                    if body.return_token_ids:
                        choice["token_ids"] = token_ids([piece] if piece.arrays else [])
                    if body.logprobs is not None:
                        tokens = scored_output(piece.arrays) if piece.arrays else []
                        choice["logprobs"] = await self._log_probs(body, ensemble, tokens, offsets[index])
                    if piece.finish_reason:
                        if piece.usage is not None and body.max_tokens == 0:
                            piece.usage = replace(piece.usage, completion=0)
                        chunks.count(piece)
                    yield chunks.chunk(choice | ending_fields(piece), extra_fields(piece))
        for chunk in chunks.end():
            yield chunk

    async def _log_probs(
        self, body: CompletionRequest, ensemble: Ensemble, tokens: Sequence[Scored], offsets: TextOffsets
    ) -> Json:
        """The log probs of the next tokens of a choice. Advances `offsets`."""
        texts = TokenIds() if body.return_tokens_as_token_ids else await self.state.token_texts.of(ensemble, tokens)
        tokens = with_top(tokens, body.num_told(body.logprobs))
        return completion_log_probs(tokens, texts, offsets)


def _reason(body: CompletionRequest, reason: str) -> str | None:
    return "length" if reason and body.max_tokens == 0 else finish_reason(reason)


def _scored(body: CompletionRequest, prompts: Sequence[_Prompt]) -> Iterator[list[Scored]]:
    """The tokens of each choice, in their order."""
    for prompt in prompts:
        before = scored_prompt([one.pieces[0].arrays for one in prompt.answers], prompt.ids) if body.echo else []
        for answer in _best(prompt.answers, body.n or 1):
            has_answer = body.max_tokens != 0
            after = (one for piece in answer.pieces for one in scored_output(piece.arrays))
            yield with_top([*before, *(after if has_answer else ())], body.num_told(body.logprobs))


def _document(
    head: Mapping[str, Json],
    body: CompletionRequest,
    prompts: Sequence[_Prompt],
    scored: Sequence[Sequence[Scored]],
    texts: TokenBytes,
) -> Json:
    choices: list[dict[str, Json]] = []
    for prompt in prompts:
        for answer in _best(prompt.answers, body.n or 1):
            text, pieces = ("", []) if body.max_tokens == 0 else (answer.text, answer.pieces)
            choice = _choice(prompt.text + text, len(choices), _reason(body, answer.last.finish_reason))
            choice["token_ids"] = token_ids(pieces) if body.return_token_ids else None
            choices.append(choice | ending_fields(answer.last) | NOT_ASKED | prompt.members)
    texts = TokenIds() if body.return_tokens_as_token_ids else texts
    for choice, tokens in zip(choices, scored, strict=False):
        choice["logprobs"] = completion_log_probs(tokens, texts, TextOffsets())
    usage = total_usage([prompt.answers for prompt in prompts])
    if usage is not None and body.max_tokens == 0:
        usage = replace(usage, completion=0)
    document = {**head, "choices": choices, "usage": usage_document(usage)}
    return with_extras(document, (answer.last for prompt in prompts for answer in prompt.answers))


def _choice(text: str, index: int, reason: str | None = None) -> dict[str, Json]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": reason}


def _prompt_values(prompt: str | list[int], body: CompletionRequest) -> Values:
    if not isinstance(prompt, str):
        return {"prompt_ids": prompt}
    if body.add_special_tokens is None:
        return {"text_input": [prompt]}
    return {"text_input": [prompt], "add_special_tokens": [body.add_special_tokens]}


def _best(found: Sequence[Answer], count: int) -> Sequence[Answer]:
    """The `count` answers with the highest log prob per token; all answers stay in their order."""
    return found if len(found) == count else sorted(found, key=_log_prob_per_token, reverse=True)[:count]


def _log_prob_per_token(answer: Answer) -> float:
    last = answer.pieces[-1].arrays
    total: float = last["cum_log_probs"].item(0)
    return total / max(1, answer.last.usage.completion if answer.last.usage else 1)
