"""Options of the commands that are clients of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ApiKeyOption: TypeAlias = Annotated[
    str, typer.Option(help="API key, if the server requires one.", envvar="LLMSERVE_API_KEY", show_default=False)
]
RootCertificatesOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="PEM file of the authority that signed the server's certificate.", show_default="this machine's"),
]
