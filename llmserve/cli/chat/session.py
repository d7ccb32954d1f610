"""The state of a chat: its model, parameters and conversation."""

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

RETRY_S = 0.5  # between two checks whether a server is back


class Place(NamedTuple):
    """The model of a chat, and the access to its server."""

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
        """`show` gets the answer as it arrives. The received part is added to the conversation.

        Returns the server's warning about the request; usually empty.
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
        """Forget the last question and its answer. Returns the question, or None if there is none."""
        if self.conversation.last_question == self.asked:
            return self.conversation.undo()
        return self.asked or None

    async def set(self, name: str, text: str) -> None:
        """Set a parameter; an empty text means the server's default. Raises `InvalidArgument`."""
        if not text:
            self.parameters.pop(name, None)
            return
        self.parameters[name] = parameters.parse(await self.client.config(), name, text)

    async def names(self) -> list[str]:
        return parameters.names(await self.client.config())

    async def talk_to(self, model: str) -> list[str]:
        """Switch to another model of the server, and keep the conversation. On `LlmserveError`, nothing changes.

        Returns the parameters that the model does not have; they are dropped.
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
        """Wait until the model answers again. It may be another server, so its inputs are read again."""
        while not await self.client.is_ready():  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)
        self.prompts = await prompts_for(self.client, self.place.tokenizer_dir)


async def open_session(
    place: Place, given: Mapping[str, Value] | None = None, conversation: Conversation | None = None
) -> Session:
    """Raises `LlmserveError` at once if no server answers."""
    client = AsyncClient(place.url, model=place.model, access=place.access)
    try:
        prompts = await prompts_for(client, place.tokenizer_dir)
    except BaseException:
        await client.close()
        raise
    return Session(place, client, prompts, dict(given or {}), conversation or Conversation())
