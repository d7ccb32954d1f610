"""Clients of one server over gRPC, HTTP and `/v1`, which return pieces of text and their times.

An answer without a finish reason is an error, so that a partial answer never counts as a complete one.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from llmserve.benchmark.workload import WORDS
from llmserve.client import AsyncClient
from llmserve.errors import LlmserveError
from tools.servers import HOST

STREAMS = ("grpc_stream", "http_stream", "v1_stream")
CANCELLED_AFTER = 3  # pieces
TIMEOUT_S = 60.0
BAD_REQUESTS = (  # with the status of each; Triton's protocol uses 500 for invalid JSON
    ("/v1/completions", b'{"model": "ensemble", "prompt": "a", "max_tokens": -8}', 400),
    ("/v2/models/ensemble/generate", b'{"text_input": "a", "max_tokens": -8}', 400),
    ("/v2/models/ensemble/generate", b'{"text_input": ', 500),
)


class Unfinished(Exception):
    """A stream ended without its finish reason, or with an error instead."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """`times_s`: seconds of each piece since the request. `error`: why it ended; empty if it is complete."""

    text: str
    times_s: tuple[float, ...]
    error: str = ""

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


class Asker:
    """The clients of one server; `grpc` and `http` are HOST:PORT."""

    def __init__(self, grpc: str, http: str, *, max_tokens: int) -> None:
        self._grpc = AsyncClient(grpc)
        limits = httpx.Limits(max_keepalive_connections=1)  # an idle client holds one descriptor of the server
        self._http = httpx.AsyncClient(base_url=f"http://{http}", timeout=TIMEOUT_S, limits=limits)
        self._max_tokens = max_tokens

    async def close(self) -> None:
        await self._grpc.close()
        await self._http.aclose()

    async def ask(self, kind: str, prompt: str, *, pieces: int | None = None) -> StreamedAnswer:
        """`kind`: one of `STREAMS`, or "http". `pieces`: the answer is cancelled after this many."""
        began = time.monotonic()
        texts: list[str] = []
        times: list[float] = []
        try:
            async with aclosing(getattr(self, f"_{kind}")(prompt)) as stream:
                async for text in stream:
                    texts.append(text)
                    times.append(time.monotonic() - began)
                    if len(texts) == pieces:
                        break
        except (LlmserveError, httpx.HTTPError, Unfinished) as error:
            return StreamedAnswer("".join(texts), tuple(times), f"{type(error).__name__}: {error}")
        return StreamedAnswer("".join(texts), tuple(times))

    async def ask_badly(self, number: int) -> str:
        """Returns what is wrong with the answer to a request that must be refused."""
        path, body, wanted = BAD_REQUESTS[number % len(BAD_REQUESTS)]
        try:
            reply = await self._http.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return "" if reply.status_code == wanted else f"a bad request had the status {reply.status_code}, not {wanted}"

    async def _grpc_stream(self, prompt: str) -> AsyncGenerator[str, None]:
        finish_reason = ""
        asked = self._grpc.generate(prompt, max_tokens=self._max_tokens, temperature=0.0, timeout_s=TIMEOUT_S)
        async with aclosing(asked) as deltas:
            async for delta in deltas:
                finish_reason = delta.finish_reason or finish_reason
                if delta.text:
                    yield delta.text
        finished(finish_reason, "the stream's end")

    async def _http_stream(self, prompt: str) -> AsyncGenerator[str, None]:
        finish_reason = ""
        body = {"text_input": prompt, "max_tokens": self._max_tokens, "temperature": 0.0, "stream": True}
        async for piece in self._events("/v2/models/ensemble/generate_stream", body):
            finish_reason = piece["finish_reason"] or finish_reason
            if piece["text_output"]:
                yield piece["text_output"]
        finished(finish_reason, "the stream's end")

    async def _v1_stream(self, prompt: str) -> AsyncGenerator[str, None]:
        finish_reason = ""
        body = {"model": "ensemble", "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "stream": True}
        async for piece in self._events("/v1/completions", body):
            for choice in piece["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                if choice["text"]:
                    yield choice["text"]
        finished(finish_reason, "the stream's end")

    async def _http_whole(self, prompt: str) -> AsyncGenerator[str, None]:
        body = {"text_input": prompt, "max_tokens": self._max_tokens, "temperature": 0.0}
        reply = await self._http.post("/v2/models/ensemble/generate", json=body)
        reply.raise_for_status()
        finished(reply.json()["finish_reason"], "the reply")
        yield reply.json()["text_output"]

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        async with self._http.stream("POST", path, json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                await reply.aread()
                reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Unfinished(f"in the stream: {event['error']}")
                    yield event


def finished(finish_reason: str, where: str) -> None:
    if finish_reason not in ("stop", "length"):
        raise Unfinished(f"{where} has the finish reason {finish_reason!r}")


def make_prompts(count: int, *, seed: int, longest: int = 120) -> list[str]:
    """Prompts of 5 to `longest` words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(5, longest))) for _ in range(count)]


async def held(metrics_port: int) -> tuple[float, float]:
    """Used KV blocks and active requests, according to a server's metrics."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{HOST}:{metrics_port}/metrics")).text

    def sample(label: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if label in line)

    return sample('kv_cache_block_type="used"'), sample('request_type="active"')
