"""`llmserve api-key`: creates an API key, and its entry in a server's file of keys."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import typer

KEY_BYTES = 32
PREFIX = "sk-"  # identifies a key to people, and to programs that search for leaked secrets


def command(
    name: Annotated[str, typer.Argument(help="Name of its owner.", show_default=False)],
    admin: Annotated[bool, typer.Option("--admin", help="Also allow calls that change the server.")] = False,
) -> None:
    """Make an API key: the key on the first line, for its owner; then the entry for the file of serve --api-keys."""
    # imported here: the other commands need no front end
    from llmserve.errors import InvalidArgument
    from llmserve.frontends.shared.api_keys import NAME

    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is not a valid name; use up to 64 letters, digits, dots, dashes and underscores"
        )
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    typer.echo(key)
    typer.echo(f"  - name: {name}\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}")
    if admin:
        typer.echo("    admin: true")
