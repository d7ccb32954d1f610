"""Ollama's routes: chat, text generation, and information on models. Answers are JSON, streamed as lines."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from fastapi import Request, Response

from llmserve import __version__
from llmserve.core import SCORES
from llmserve.frontends.http.json_fields import Json, encode_json
from llmserve.frontends.text.answers.event_stream import EventStream, json_answer
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.answers.generation import Piece
from llmserve.frontends.text.answers.log_probs import chat_log_probs, scored_output
from llmserve.frontends.text.answers.replies import LIMITS
from llmserve.frontends.text.answers.spoken import Call, Prepared, read_parts
from llmserve.frontends.text.answers.vectors import pooling_of
from llmserve.frontends.text.ollama.fields import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from llmserve.frontends.text.requests.ensembles import Ensemble, Named
from llmserve.frontends.text.requests.formats import guide_values
from llmserve.frontends.text.state import ApiState
from llmserve.stages.answer_parts import Part, PartKind

LINES = "application/x-ndjson"
LATEST = ":latest"  # tag that Ollama's clients add to names
UNLOADING = (0, "0", "0s", "0m", "0h")  # values of keep_alive that unload a model in Ollama


@dataclass(slots=True)
class _Reply:
    """The common members of one answer's lines, and their times."""

    model: str
    is_chat: bool
    began_ns: int = field(default_factory=time.monotonic_ns)
    first_ns: int = 0
    call: Call | None = None  # the call whose arguments are incomplete

    def lines(self, parts: Sequence[Part], *, is_last: bool) -> list[dict[str, Json]]:
        """The lines for parts of an answer. A call is sent when it is complete; one that was cut off is not sent."""
        self.first_ns = self.first_ns or time.monotonic_ns()
        found = []
        for part in parts:
            if part.kind is PartKind.ARGUMENTS and self.call is not None:
                self.call.pieces.append(part.text)
                continue
            found += self._called()
            if part.kind is PartKind.CALL:
                self.call = Call(part.text)
            else:
                found.append(self._line(**{"thinking" if part.kind is PartKind.THOUGHT else "content": part.text}))
        return found + (self._called() if is_last else [])

    def _called(self) -> list[dict[str, Json]]:
        call, self.call = self.call, None
        if call is None or call.value is None:
            return []
        return [self._line(tool_calls=[{"function": {"name": call.name, "arguments": call.value}}])]

    def _line(self, content: str = "", **more: Json) -> dict[str, Json]:
        said = {"message": {"role": "assistant", "content": content, **more}}
        return {**self._head(), **(said if self.is_chat else {"response": content, **more}), "done": False}

    def end(self, last: Piece) -> dict[str, Json]:
        now, usage = time.monotonic_ns(), last.usage
        # for an ensemble without times, use those of the lines
        _, scheduled, first, end = last.times_ns or (0, self.began_ns, self.first_ns or now, now)
        counts = {} if usage is None else {"prompt_eval_count": usage.prompt, "eval_count": usage.completion}
        return {
            **self._line(),
            "done": True,
            "done_reason": "length" if last.finish_reason in LIMITS else "stop",
            "total_duration": now - self.began_ns,
            "load_duration": 0,
            "prompt_eval_duration": first - scheduled,
            "eval_duration": end - first,
            **counts,
            **({"warning": last.warning} if last.warning else {}),
        }

    def loaded(self, keep_alive: Json) -> dict[str, Json]:
        return {**self._line(), "done": True, "done_reason": "unload" if keep_alive in UNLOADING else "load"}

    def _head(self) -> dict[str, Json]:
        return {"model": self.model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _whole(lines: Sequence[Mapping[str, Json]], end: dict[str, Json], *, is_chat: bool) -> dict[str, Json]:
    """Joins the lines of an answer to one document."""
    said = [line["message"] if is_chat else line for line in lines]
    joined: dict[str, Json] = {}
    for member in ("content", "response", "thinking"):
        texts = [one[member] for one in said if member in one]
        if texts and any(texts):
            joined[member] = "".join(texts)
    if calls := [call for one in said for call in one.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if log_probs := [token for line in lines for token in line.get("logprobs", ())]:
        end["logprobs"] = log_probs
    if not is_chat:
        return end | joined
    return end | {"message": end["message"] | joined}


@dataclass(frozen=True, slots=True)
class Ollama:
    state: ApiState

    async def chat(self, body: OllamaChatRequest, request: Request) -> Response:
        """Generate the assistant's next message."""
        ensemble = self._find(body)
        reply = _Reply(body.model, is_chat=True)
        if not body.messages:
            return json_answer(reply.loaded(body.keep_alive))
        prepared = await self.state.conversations.prepared(ensemble, body.talk())
        return await self._answer(body, request, ensemble, prepared, reply)

    async def generate(self, body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt or, with `raw`, continue it."""
        ensemble = self._find(body)
        reply = _Reply(body.model, is_chat=False)
        if not body.prompt:
            return json_answer(reply.loaded(body.keep_alive))
        prepared = _raw(body) if body.raw else await self.state.conversations.prepared(ensemble, body.talk())
        return await self._answer(body, request, ensemble, prepared, reply)

    async def _answer(
        self,
        body: OllamaChatRequest | OllamaGenerateRequest,
        request: Request,
        ensemble: Ensemble,
        prepared: Prepared,
        reply: _Reply,
    ) -> Response:
        sampling = await self.state.sampling(ensemble, body.sampling(prepared.guide))
        wanted = bool(body.logprobs)
        pieces = self.state.caller(request).pieces(
            ensemble, prepared.prompt, sampling, streaming=body.streams, wants_tokens=wanted
        )
        documents = _documents(reply, prepared, pieces, partial(self._log_probs, ensemble) if wanted else None)
        if body.streams:
            return EventStream(_encoded(documents), LINES)
        reply.first_ns = reply.began_ns  # all lines are made at the end
        *lines, end = [document async for document in documents]
        return json_answer(_whole(lines, end, is_chat=reply.is_chat))

    async def _log_probs(self, ensemble: Ensemble, piece: Piece) -> list[Json]:
        tokens = scored_output(piece.arrays)
        return chat_log_probs(tokens, await self.state.token_texts.of(ensemble, tokens))

    async def tags(self) -> Response:
        """List the models."""
        return json_answer({"models": [self._model(name) for name in self.state.listed()]})

    async def running(self) -> Response:
        """List the models; all of them are loaded."""
        models = [{**self._model(name), "size_vram": 0} for name in self.state.listed()]
        return json_answer({"models": models})

    async def version(self) -> Response:
        """The version of this server."""
        return json_answer({"version": __version__})

    async def show(self, body: OllamaShowRequest, request: Request) -> Response:
        """Describe a model. Its capabilities include tools if it has its own format for calls."""
        body.model = body.model or body.name
        plain, embedders = body.model.removesuffix(LATEST), self.state.embedders
        if embedders.has(plain):
            makes = pooling_of(self.state.caller(request), embedders.find(plain)).get("makes")
            can = [] if makes == SCORES else ["embedding"]
        else:
            can = await self._abilities(self._find(body))
        head = self._model(body.model)
        known = {"details": head["details"], "modified_at": head["modified_at"], "capabilities": can}
        return json_answer({"modelfile": "", "parameters": "", "template": "", "model_info": {}, **known})

    async def _abilities(self, ensemble: Ensemble) -> list[Json]:
        style = await self.state.conversations.style(ensemble)
        return [
            "completion",
            *(["tools"] if style.tools and style.tools.markers else []),
            *(["thinking"] if style.reasoning else []),
        ]

    def _model(self, name: str) -> dict[str, Json]:
        created = datetime.fromtimestamp(self.state.created, UTC).isoformat().replace("+00:00", "Z")
        details = {"format": "", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}
        return {
            "name": name, "model": name, "modified_at": created, "size": 0, "digest": "", "details": details,
        }  # fmt: skip

    def _find(self, body: Named) -> Ensemble:
        """The ensemble by its name, with or without `LATEST`. Answers repeat the client's form of the name."""
        asked, ensembles = body.model, self.state.ensembles
        plain = asked.removesuffix(LATEST)
        known = {*ensembles.names(), *ensembles.listed(), *ensembles.adapters()}
        name = next((each for each in (asked, plain, plain + LATEST) if each in known), plain)
        body.model = name
        ensemble = ensembles.named(body)
        body.model = asked if body.model == name else body.model
        return ensemble


def _raw(body: OllamaGenerateRequest) -> Prepared:
    """A text that is sent unchanged."""
    if body.system:
        raise Refused("system cannot be used with raw: the text is sent unchanged", "system")
    schema = body.schema_()
    guide = {} if schema is None else guide_values("json_schema", json.dumps(schema))
    return Prepared({"text_input": [body.prompt]}, guide, lambda: None)


async def _documents(
    reply: _Reply,
    prepared: Prepared,
    pieces: AsyncGenerator[Piece, None],
    log_probs: Callable[[Piece], Awaitable[list[Json]]] | None,
) -> AsyncGenerator[dict[str, Json], None]:
    """The lines of an answer. Log probs are with the first line of their tokens, or with the next one."""
    reader, last = prepared.new_reader(), Piece("")
    tokens: list[Json] = []
    async with aclosing(pieces):
        async for piece in pieces:
            is_last = bool(piece.finish_reason)
            tokens += [] if log_probs is None else await log_probs(piece)
            for line in reply.lines(read_parts(reader, piece.text, is_last=is_last), is_last=is_last):
                yield {**line, "logprobs": tokens} if tokens else line
                tokens = []
            last = piece
    yield {**reply.end(last), **({"logprobs": tokens} if tokens else {})}


async def _encoded(documents: AsyncGenerator[dict[str, Json], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(documents):
        async for document in documents:
            yield encode_json(document) + b"\n"
