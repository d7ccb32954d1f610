"""Whom a chat talks to, with which parameters, and what has been said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llmserve.cli.chat import parameters
from llmserve.cli.chat.conversation import Conversation, Value
from llmserve.cli.chat.prompts import Prompts, more_inputs, prompts_for
from llmserve.cli.chat.statistics import AnswerStatistics
from llmserve.client import Access, AsyncClient
from llmserve.errors import Unavailable

RETRY_S = 0.5  # between two looks whether a server is back


class Place(NamedTuple):
    """Who is talked to, and what they want for it."""

    url: str
    model: str
    access: Access
    tokenizer_dir: Path | None = None


@dataclass(slots=True)
class Session:
    place: Place
    client: AsyncClient
    prompts: Prompts
    parameters: dict[str, Value] = field(default_factory=dict)  # under the names of `parameters.py`
    conversation: Conversation = field(default_factory=Conversation)
    asked: str = ""  # the last question; without an answer it is not part of the conversation
    latest: AnswerStatistics | None = None

    async def ask(self, question: str, show: Callable[[str], None]) -> str:
        """`show` gets the answer as it arrives. It becomes part of the conversation, as far as it came.

        Returns what the server has to say about the request; empty as a rule.
        """
        pieces: list[str] = []
        warning = ""
        prompt = self.prompts.prompt(self.conversation.with_question(question))
        inputs = more_inputs(await self.client.config(), parameters.as_inputs(self.parameters))
        self.asked, self.latest = question, AnswerStatistics()
        try:
            async with aclosing(self.client.generate(prompt, **inputs)) as deltas:  # type: ignore[arg-type]
                async for delta in deltas:
                    self.latest.add(delta)
                    pieces.append(delta.text)
                    warning = delta.warning or warning
                    show(delta.text)
        except Unavailable:  # the question is asked again when the server is back
            pieces.clear()
            raise
        finally:
            if answer := "".join(pieces):
                self.conversation.add(question, answer)
        return warning

    def taken_back(self) -> str | None:
        """The last question that was asked, which with its answer is forgotten; None when there is none."""
        if self.conversation.last_question == self.asked:
            return self.conversation.undo()
        return self.asked or None

    async def set(self, name: str, text: str) -> None:
        """One parameter; without a text it is the server's default. Raises `InvalidArgument`."""
        if not text:
            self.parameters.pop(name, None)
            return
        self.parameters[name] = parameters.parse(await self.client.config(), name, text)

    async def names(self) -> list[str]:
        return parameters.names(await self.client.config())

    async def talk_to(self, model: str) -> list[str]:
        """Another model of the same server; the conversation goes on. Raises `LlmserveError`, and nothing changes.

        Returns the parameters that it does not have, which are dropped.
        """
        other = await open_session(self.place._replace(model=model))
        await self.client.close()
        self.place, self.client, self.prompts = other.place, other.client, other.prompts
        known = await self.names()
        dropped = [name for name in self.parameters if name not in known]
        for name in dropped:
            del self.parameters[name]
        return dropped

    async def wait_for_server(self) -> None:
        """Until the model answers again. Another server may be there then, so its inputs are looked at anew."""
        while not await self.client.is_ready():  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)
        self.prompts = await prompts_for(self.client, self.place.tokenizer_dir)


async def open_session(
    place: Place, given: Mapping[str, Value] | None = None, conversation: Conversation | None = None
) -> Session:
    """Says at once when nobody is there: raises `LlmserveError`."""
    client = AsyncClient(place.url, model=place.model, access=place.access)
    try:
        prompts = await prompts_for(client, place.tokenizer_dir)
    except BaseException:
        await client.close()
        raise
    return Session(place, client, prompts, dict(given or {}), conversation or Conversation())
