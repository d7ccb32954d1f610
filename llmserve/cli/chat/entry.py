"""`llmserve chat`: talk to a served model in the terminal, over gRPC, token by token.

Answers are read on an asyncio loop, which turns Ctrl-C into the cancellation of one task. A KeyboardInterrupt inside
gRPC's blocking client can leave its locks taken, and the next question would wait for ever.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.errors import InvalidArgument, raise_problems


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
    param: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: any other, as /params has them: guide=json, log_probs=on; may be repeated."),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="A conversation that /save has written.", show_default=False)
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tokens and speed behind each answer.")] = False,
    markdown: Annotated[bool, typer.Option(help="Render it, on a terminal.")] = True,
    history: Annotated[bool, typer.Option(help="Keep what is typed for the next chat.")] = True,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(help="Engine or checkpoint whose chat format is applied if the model takes only text."),
    ] = None,
    api_key: ApiKeyOption = "",
    root_certificates: RootCertificatesOption = None,
) -> None:
    """Chat with a served model; the conversation so far is sent with every question. /help lists commands."""
    # the other commands need no gRPC
    from llmserve.cli.chat.keyboard import history_file
    from llmserve.cli.chat.session import Place, open_session
    from llmserve.cli.chat.talk import Talk
    from llmserve.client import Access

    pairs = [pair.partition("=") for pair in param or ()]
    wrong = [f"{name}: expected NAME=VALUE" for name, equals, _ in pairs if not equals]
    raise_problems(InvalidArgument, "--param", wrong)
    given = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    place = Place(url, model, Access(api_key, root_certificates), tokenizer_dir)
    with asyncio.Runner() as runner:
        session = runner.run(open_session(place, {name: each for name, each in given.items() if each is not None}))
        try:
            kept = history_file() if history and once is None else None
            talk = Talk(session, runner, kept, markdown, stats)
            talk.say(session.prompts.note)
            if load is not None:
                talk.load(load)
            for name, _, text in pairs:
                runner.run(session.set(name, text))
            session.conversation.system = system or session.conversation.system
            if once is None:
                talk.loop()
            else:
                talk.ask(once)
        finally:
            runner.run(session.client.close())
