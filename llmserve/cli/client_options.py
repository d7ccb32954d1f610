"""Options of the commands that are clients of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ApiKeyOption: TypeAlias = Annotated[
    str, typer.Option(help="For a server that wants one.", envvar="LLMSERVE_API_KEY", show_default=False)
]
RootCertificatesOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="PEM: who may sign the server's certificate.", show_default="this machine's")
]
