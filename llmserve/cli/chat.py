"""`llmserve chat`: talk to a served model in the terminal, over gRPC, token by token."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from llmserve.errors import LlmserveError, Unavailable

if TYPE_CHECKING:
    from llmserve.client import Client

PROMPT = "you> "
HELP = "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends the chat."


def command(
    url: Annotated[str, typer.Option(help="The server's gRPC address.")] = "localhost:8001",
    once: Annotated[str | None, typer.Option(help="Ask this, print the answer and exit.", show_default=False)] = None,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    model: Annotated[str, typer.Option(help="Model to talk to.")] = "ensemble",
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from this much probability.", show_default=False)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: none.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random draws.", show_default=False)] = None,
) -> None:
    """Chat with a served model; the conversation so far is sent with every question."""
    from llmserve.client import Client  # the other commands need no gRPC

    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty,
        "seed": seed,
    }  # fmt: skip
    sampling = {name: value for name, value in given.items() if value is not None}
    with Client(url, model=model) as client:
        client.config()  # says at once when nobody is there
        chat = Chat(client, {"max_tokens": max_tokens, **sampling}, system)
        if once is not None:
            chat.ask(once)
            print()
        else:
            _talk(chat)


@dataclass(slots=True)
class Chat:
    """One conversation."""

    client: Client
    parameters: Mapping[str, int | float]
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> None:
        """Print the answer as it arrives. It becomes part of the conversation, as far as it came."""
        pieces: list[str] = []
        asked = {"role": "user", "content": question}
        system = [{"role": "system", "content": self.system}] if self.system else []
        deltas = self.client.generate([*system, *self.messages, asked], **self.parameters)  # type: ignore[arg-type]
        try:
            with closing(deltas):
                for delta in deltas:
                    pieces.append(delta.text)
                    print(delta.text, end="", flush=True)
        finally:
            if answer := "".join(pieces):
                self.messages += [asked, {"role": "assistant", "content": answer}]


def _talk(chat: Chat) -> None:
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
            _answer(chat, question)


def _answer(chat: Chat, question: str) -> None:
    try:
        chat.ask(question)
        print()
    except KeyboardInterrupt:
        print(" [cancelled]")
    except Unavailable:
        print()
        raise
    except LlmserveError as error:
        print(f"\nerror: {error}", file=sys.stderr)
