"""`llmserve chat`: talk to a served model in the terminal, over gRPC, token by token.

Answers are read on an asyncio loop, which turns Ctrl-C into the cancellation of one task. A KeyboardInterrupt inside
gRPC's blocking client can leave its locks taken, and the next question would wait for ever.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.errors import LlmserveError, Unavailable

if TYPE_CHECKING:
    from llmserve.cli.chat_prompts import Prompts
    from llmserve.client import AsyncClient

PROMPT = "you> "
HELP = "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends the chat."


def command(
    url: Annotated[str, typer.Option(help="The server's gRPC address; grpcs://HOST:PORT for TLS.")] = "localhost:8001",
    once: Annotated[str | None, typer.Option(help="Ask this, print the answer and exit.", show_default=False)] = None,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    model: Annotated[str, typer.Option(help="Model to talk to.")] = "ensemble",
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from this much probability.", show_default=False)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: none.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random draws.", show_default=False)] = None,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(help="Engine or checkpoint whose chat format is applied if the model takes only text."),
    ] = None,
    api_key: ApiKeyOption = "",
    root_certificates: RootCertificatesOption = None,
) -> None:
    """Chat with a served model; the conversation so far is sent with every question."""
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty,
        "seed": seed,
    }  # fmt: skip
    sampling = {name: value for name, value in given.items() if value is not None}
    place = Place(url, model, api_key, root_certificates)
    opening = _open(place, {"max_tokens": max_tokens, **sampling}, system=system, tokenizer_dir=tokenizer_dir)
    with asyncio.Runner() as runner:
        chat = runner.run(opening)
        try:
            if once is not None:
                _finish(runner.run(chat.ask(once)))
            else:
                _talk(chat, runner)
        finally:
            runner.run(chat.client.close())


class Place(NamedTuple):
    """Who is talked to, and what they want for it."""

    url: str
    model: str
    api_key: str
    root_certificates: Path | None


async def _open(
    place: Place, parameters: Mapping[str, int | float], *, system: str, tokenizer_dir: Path | None
) -> Chat:
    """A conversation that has not begun; says at once when nobody is there."""
    # the other commands need no gRPC
    from llmserve.cli.chat_prompts import more_inputs, prompts_for
    from llmserve.client import Access, AsyncClient

    client = AsyncClient(place.url, model=place.model, access=Access(place.api_key, place.root_certificates))
    try:
        prompts = await prompts_for(client, tokenizer_dir)
        chat = Chat(client, prompts, more_inputs(await client.config(), parameters), system)
    except BaseException:
        await client.close()
        raise
    say(prompts.note)
    return chat


@dataclass(slots=True)
class Chat:
    """One conversation."""

    client: AsyncClient
    prompts: Prompts
    parameters: Mapping[str, int | float | str]
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    async def ask(self, question: str) -> str:
        """Print the answer as it arrives. It becomes part of the conversation, as far as it came.

        Returns what the server has to say about the request; empty as a rule.
        """
        pieces: list[str] = []
        warning = ""
        asked = {"role": "user", "content": question}
        system = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self.prompts.prompt([*system, *self.messages, asked])
        try:
            async with aclosing(self.client.generate(prompt, **self.parameters)) as deltas:  # type: ignore[arg-type]
                async for delta in deltas:
                    pieces.append(delta.text)
                    warning = delta.warning or warning
                    print(delta.text, end="", flush=True)
        finally:
            if answer := "".join(pieces):
                self.messages += [asked, {"role": "assistant", "content": answer}]
        return warning


def _finish(warning: str) -> None:
    """After an answer."""
    print()
    say(warning)


def say(note: str) -> None:
    if note:
        sys.stdout.flush()
        print(f"note: {note}", file=sys.stderr)


def _talk(chat: Chat, runner: asyncio.Runner) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # line editing and history for input()

        print(HELP)
    while True:
        try:
            question = input(PROMPT if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                print()
            return
        if question:
            _answer(chat, question, runner)


def _answer(chat: Chat, question: str, runner: asyncio.Runner) -> None:
    try:
        _finish(runner.run(chat.ask(question)))
    except KeyboardInterrupt:
        print(" [cancelled]")
    except Unavailable:
        print()
        raise
    except LlmserveError as error:
        print(f"\nerror: {error}", file=sys.stderr)
