"""`llmserve chat`: a chat with a model in the terminal, over gRPC, token by token.

Answers are read on an asyncio loop, which turns Ctrl-C into the cancellation of one task. A KeyboardInterrupt inside
gRPC's blocking client can leave its locks taken, so the next question would wait forever.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.errors import InvalidArgument, raise_problems

DEFAULT_URL = "localhost:8001"


def command(
    model_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[ENGINE|CHECKPOINT]",
            help="Chat without a server, with an engine directory, a Hugging Face folder or GGUF file "
            "(built first), or a name of `llmserve pull`.",
            show_default=False,
        ),
    ] = None,
    url: Annotated[str, typer.Option(help="The server's gRPC address; grpcs://HOST:PORT for TLS.")] = DEFAULT_URL,
    once: Annotated[str | None, typer.Option(help="Ask this, print the answer and exit.", show_default=False)] = None,
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    model: Annotated[str, typer.Option(help="Model to talk to.")] = "ensemble",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens in an answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0: greedy.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this probability.", show_default=False)] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1: none.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws.", show_default=False)] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: any other parameter of /params: guide=json, log_probs=on; may be repeated."),
    ] = None,
    load: Annotated[Path | None, typer.Option(help="Load a conversation of /save.", show_default=False)] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens and speed after each answer.")] = False,
    markdown: Annotated[bool, typer.Option(help="Render markdown on a terminal.")] = True,
    history: Annotated[bool, typer.Option(help="Store the lines that you type for the next chat.")] = True,
    tokenizer_dir: Annotated[
        Path | None,
        typer.Option(help="Engine or checkpoint whose chat format is applied if the model takes only text."),
    ] = None,
    api_key: ApiKeyOption = "",
    root_certificates: RootCertificatesOption = None,
) -> None:
    """Chat with an engine, a checkpoint, or a running server (--url). /help lists the commands of a chat."""
    from llmserve.cli.chat.keyboard import history_file
    from llmserve.cli.chat.session import Place, open_session
    from llmserve.cli.chat.talk import Talk
    from llmserve.client import Access

    wanted = _pairs(param or ())
    given = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    with asyncio.Runner() as runner, _address(model_path, url, runner) as address:
        place = Place(address, model, Access(api_key, root_certificates), tokenizer_dir)
        session = runner.run(open_session(place, {name: each for name, each in given.items() if each is not None}))
        try:
            talk = Talk(session, runner, history_file() if history and once is None else None, markdown, stats)
            talk.begin(load, wanted, system)
            if once is None:
                talk.loop()
            else:
                talk.ask(once)
        finally:
            runner.run(session.client.close())


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in given]
    wrong = [f"{name}: expected NAME=VALUE" for name, equals, _ in pairs if not equals]
    raise_problems(InvalidArgument, "--param", wrong)
    return {name: text for name, _, text in pairs}


@contextmanager
def _address(model_path: Path | None, url: str, runner: asyncio.Runner) -> Iterator[str]:
    """The address of a gRPC server: `url`, or that of a new server on this machine, which ends with this process."""
    if model_path is None:
        yield url
        return
    if url != DEFAULT_URL:
        raise InvalidArgument(f"{model_path} and --url {url}: give one of them")
    from llmserve.evaluation.served.process import own_server

    with own_server((sys.executable, "-m", "llmserve.cli.owned_server"), _engine(model_path), ()) as server:
        runner.run(server.ready())
        yield server.grpc


def _engine(path: Path) -> Path:
    from llmserve.engine.directory.artifact import MANIFEST_FILE

    if (path / MANIFEST_FILE).is_file():
        return path
    from llmserve.cli.build import built
    from llmserve.cli.pull import CATALOGUE, pull

    return built(pull(str(path)) if str(path) in CATALOGUE and not path.exists() else path)
