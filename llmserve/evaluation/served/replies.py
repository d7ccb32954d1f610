"""A question to a server and its reply, over gRPC's ensemble or OpenAI's API."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from llmserve.benchmark.http_client import BadAnswer, ConnectionLost, Connections, parse_server
from llmserve.benchmark.openai_endpoint import Events, error_text, http_message
from llmserve.benchmark.records import Record
from llmserve.client import Access, AsyncClient, Parameter
from llmserve.errors import LlmserveError, Unavailable
from llmserve.stages.chat import Message

Json: TypeAlias = Any
MODEL = "ensemble"
OVER_GRPC, OVER_V1 = "gRPC", "/v1"
TOKENS, LOG_PROBS = "return_tokens", "return_log_probs"  # inputs of the ensemble, if it has them
THOUGHTS = "reasoning_content"
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    prompt: str | tuple[Message, ...]
    max_tokens: int
    streams: bool = True
    seed: int | None = None  # None: the likeliest tokens; else drawn with this seed, at a temperature of 1
    wants_log_probs: bool = False  # over /v1; over gRPC they are always returned if available
    text: str = ""  # the forced answer: only characters without a special meaning in regular expressions

    def unary(self) -> Question:
        return replace(self, streams=False)

    def messages(self) -> list[dict[str, str]] | None:
        """None for a plain-text prompt."""
        if isinstance(self.prompt, str):
            return None
        return [{"role": message.role, "content": message.content} for message in self.prompt]


@dataclass(slots=True)
class ServedAnswer:
    """If the request failed, its record has an error."""

    record: Record = field(default_factory=Record)
    text: str = ""
    token_ids: list[int] | None = None  # None: not returned; likewise the next
    log_probs: list[float] | None = None
    has_thoughts: bool = False  # separated from the answer, so the text is not the network's output


class Asker(Protocol):
    """A client of a server. `ask` never raises: errors are in the reply."""

    @property
    def name(self) -> str: ...

    async def ask(self, question: Question) -> ServedAnswer: ...


@dataclass(frozen=True, slots=True)
class GrpcAsker:
    client: AsyncClient
    inputs: frozenset[str]  # of its model
    name: str = OVER_GRPC

    async def ask(self, question: Question) -> ServedAnswer:
        reply = ServedAnswer()
        told = {name: True for name in (TOKENS, LOG_PROBS) if name in self.inputs}
        prompt = question.prompt if isinstance(question.prompt, str) else question.messages() or []
        reply.record.started = time.perf_counter()
        stream = self.client.generate(
            prompt,
            max_tokens=question.max_tokens,
            stream=question.streams,
            request_id=question.id,
            **told,
            **_sampled(question),  # type: ignore[arg-type]  # the client's own names may not be given twice
        )
        if TOKENS in told:
            reply.token_ids = []
        if LOG_PROBS in told:
            reply.log_probs = []
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    if delta.text:
                        reply.record.arrived.append(time.perf_counter())
                    reply.text += delta.text
                    if reply.token_ids is not None:
                        reply.token_ids += delta.token_ids
                    if reply.log_probs is not None:
                        reply.log_probs += delta.log_probs
                    if delta.finish_reason:
                        reply.record.prompt_tokens = delta.prompt_tokens
                        reply.record.cached_tokens = delta.cached_tokens
                        reply.record.completion_tokens = delta.completion_tokens
        except LlmserveError as error:
            is_unreachable = isinstance(error, Unavailable)
            reply.record.fail(error.code.value, str(error), is_unreachable=is_unreachable)
        return reply


def _sampled(question: Question) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {"temperature": 0.0}
    if question.seed is not None:
        found = {"temperature": 1.0, "top_p": 1.0, "seed": question.seed}
    if question.text:
        found |= {"guided_decoding_guide_type": "regex", "guided_decoding_guide": question.text}
    return found


@dataclass(frozen=True, slots=True)
class V1Asker:
    """Chat completions for messages, completions for plain text."""

    connections: Connections
    model: str
    api_key: str = field(default="", repr=False)
    name: str = OVER_V1

    async def ask(self, question: Question) -> ServedAnswer:
        reply = ServedAnswer(log_probs=[] if question.wants_log_probs else None)
        record, body = reply.record, bytearray()
        events = Events(record)

        def read(moment: float, data: bytes) -> None:
            body.extend(data)
            if question.streams:
                events.feed(moment, data)

        record.started = time.perf_counter()
        path, asked = self._asked(question)
        message = http_message(self.connections.server, "POST", path, json.dumps(asked).encode(), self.api_key)
        try:
            connection = await self.connections.take()
        except OSError as error:
            record.fail("cannot connect", str(error), is_unreachable=True)
            return reply
        try:
            status = await connection.exchange(message, read)
            if status != 200:
                record.fail(f"HTTP {status}", error_text(bytes(connection.kept)))
            elif question.streams:
                if not events.has_ended:
                    record.fail("answer without an end")
                _join(reply, _events(body))
            else:
                record.arrived.append(time.perf_counter())
                _join(reply, [json.loads(body)])
        except (ConnectionLost, BadAnswer) as error:
            record.fail("connection lost", str(error), is_unreachable=True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            record.fail("answer that is not in OpenAI's format", f"{error!r} in {bytes(body[:100])!r}")
        finally:
            self.connections.give_back(connection)
        return reply

    def _asked(self, question: Question) -> tuple[str, Json]:
        """Path and body."""
        messages = question.messages()
        seeded = question.seed is not None
        body: Json = {"model": self.model, "max_tokens": question.max_tokens, "temperature": float(seeded)}
        body |= {"seed": question.seed} if seeded else {}
        body |= {"structured_outputs": {"regex": question.text}} if question.text else {}
        wants = question.wants_log_probs
        body |= {"stream": True, "stream_options": {"include_usage": True}} if question.streams else {}
        if messages is None:
            return "/v1/completions", body | {"prompt": question.prompt} | ({"logprobs": 0} if wants else {})
        return "/v1/chat/completions", body | {"messages": messages} | ({"logprobs": True} if wants else {})


def _events(body: bytearray) -> list[Json]:
    """The events of a stream, except the final marker."""
    lines = [line[5:].strip() for line in body.decode().splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != DONE]


def _join(reply: ServedAnswer, documents: list[Json]) -> None:
    """Combine a stream's events, or read the single document of a unary answer."""
    for document in documents:
        for choice in document.get("choices", ()):
            piece = choice.get("delta") or choice.get("message") or choice
            thought = piece.get(THOUGHTS) or ""
            reply.has_thoughts |= bool(thought)
            reply.text += thought + (piece.get("content") or piece.get("text") or "")
            if reply.log_probs is not None:
                reply.log_probs += _log_probs(choice.get("logprobs") or {})
        if usage := document.get("usage"):
            reply.record.prompt_tokens = usage["prompt_tokens"]
            reply.record.completion_tokens = usage["completion_tokens"]
            reply.record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _log_probs(told: Json) -> list[float]:
    """Log-probs of a chat's or a completion's tokens: float32 numbers, which JSON preserves exactly."""
    return told.get("token_logprobs") or [token["logprob"] for token in told.get("content") or ()]


@asynccontextmanager
async def grpc_asker(url: str, access: Access, adapter: str = "") -> AsyncGenerator[GrpcAsker, None]:
    """For the adapter with this name, if given. Raises `LlmserveError` if the server cannot be reached."""
    async with AsyncClient(url, model=MODEL, access=access, adapter=adapter) as client:
        config = await client.config()
        yield GrpcAsker(client, frozenset(entry.name for entry in config.input))


@asynccontextmanager
async def v1_asker(url: str, access: Access, adapter: str = "") -> AsyncGenerator[V1Asker, None]:
    server = parse_server(url, access.root_certificates if url.startswith("https://") else None)
    connections = Connections(server)
    try:
        yield V1Asker(connections, adapter or MODEL, access.api_key)
    finally:
        await connections.close()


async def counters(url: str, names: Mapping[str, str]) -> dict[str, float]:
    """Sums of metric families on a metrics page, under llmserve's names for them."""
    from prometheus_client.parser import text_string_to_metric_families

    connections, body = Connections(parse_server(url, None)), bytearray()
    try:
        connection = await connections.take()
        message = http_message(connections.server, "GET", "/metrics", b"", "")
        await connection.exchange(message, lambda moment, data: body.extend(data))
        connections.give_back(connection)
    except (OSError, ConnectionLost, BadAnswer) as error:
        raise Unavailable(f"the metrics at {url} cannot be read: {error}") from error
    finally:
        await connections.close()
    found = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            for name, wanted in names.items():
                found[name] += sample.value if sample.name == wanted else 0.0
    return found
