"""`llmserve prefix`: computes the KV cache of prompts' beginnings ahead of time, and seals it into an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llmserve.builder.prefix import Prefix, seal_prefixes
from llmserve.errors import InvalidArgument


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory, made by llmserve build.")],
    messages: Annotated[
        list[Path] | None,
        typer.Option(help="JSON with the messages that chats begin with; may be repeated.", show_default=False),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="File with the text that prompts begin with; may be repeated.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: every core that this process may use.", min=0)] = 0,
) -> None:
    """Compute the KV cache of system prompts ahead, so that the first request of a new server finds it.

    They replace those that the engine has for this machine's kernels."""
    prefixes = [Prefix.read(path, is_chat=True) for path in messages or ()]
    prefixes += [Prefix.read(path, is_chat=False) for path in text or ()]
    if not prefixes:
        raise InvalidArgument("no prefix; give --messages system.json or --text system.txt")
    seal(engine, prefixes, threads)


def seal(engine: Path, prefixes: Sequence[Prefix], threads: int = 0) -> None:
    """Seal prefixes into an engine, and print what was sealed."""
    sealed = seal_prefixes(engine, prefixes, threads=threads)
    for name, num_tokens, num_found in sealed.num_tokens:
        typer.echo(f"{name}: {num_tokens} tokens, of which requests find {num_found}")
    typer.echo(f"{engine / sealed.file}: {sealed.num_bytes / 2**20:.1f} MiB")
