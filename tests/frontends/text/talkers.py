"""Servers of models that call tools and think, whose answers the test says beforehand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai

from llmserve.core import FinishReason, GenerateRequest, TokenEvent
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.chat_templates import write_talker
from tests.frontends.server import STRICT, RunningServer
from tests.frontends.text.conftest import serving
from tests.stages.scripted import ScriptedEngine

VOCAB_SIZE = 420
MODEL = "ensemble"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = '{"city": "Rome"}'


@dataclass
class Talker:
    server: RunningServer
    engine: WideEngine
    tokenizer: Tokenizer
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    def says(self, text: str, finish: FinishReason = FinishReason.END_ID) -> None:
        """The next answers, a token at a time."""
        self.engine.portions = [[token] for token in self.tokenizer.encode_marked(text)]
        self.engine.finish = finish

    def answers(self, answer: Callable[[str], str]) -> None:
        """The next answers by their prompts."""

        def portions(ids: Sequence[int]) -> list[list[int]]:
            prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
            return [[token] for token in self.tokenizer.encode_marked(answer(prompt))]

        self.engine.answers = portions
        self.engine.finish = FinishReason.END_ID

    @property
    def prompt(self) -> str:
        """Of the latest request, with its special tokens."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt_ids, skip_special_tokens=False)


@dataclass
class WideEngine(ScriptedEngine):
    """`answers`: by the prompt's ids; None: the portions as they are."""

    answers: Callable[[Sequence[int]], Sequence[Sequence[int]]] | None = None

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        if self.answers is not None:
            self.portions = self.answers(request.prompt_ids)
        return super().submit(request)

    @property
    def info(self) -> Any:
        return replace(super().info, vocab_size=VOCAB_SIZE, max_seq_len=4096)


@contextmanager
def talking(path: Path, kind: str, text: TextSettings = STRICT) -> Iterator[Talker]:
    """`kind`: a key of `chat_templates.TEMPLATES`."""
    write_talker(path, kind, VOCAB_SIZE)
    engine = WideEngine()
    with (
        serving(path, open_engine=lambda: engine, text=text) as server,
        openai.OpenAI(base_url=f"{server.http_url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=server.http_url, api_key="none", max_retries=0) as claude,
    ):
        yield Talker(server, engine, load_tokenizer(path), client, claude)
