"""`llmserve tune ENGINE`: times the engine's tactics on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.build_progress import shown_progress
from llmserve.cli.tactics_table import print_tactics
from llmserve.cli.termination import terminated_as_exception
from llmserve.engine.directory.artifact import CACHE_FILE, EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.errors import InvalidArgument


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory.", show_default=False)],
) -> None:
    """Measure an engine's tactics on this machine, and save the times next to the engine.

    Answers do not change. Servers use the times when they next load the engine."""
    directory = EngineDirectory.open(engine)
    try:
        with terminated_as_exception(), shown_progress() as progress:
            runtime_for(directory.manifest.target).tune(directory, progress)
    except OSError as error:
        raise InvalidArgument(f"{engine / CACHE_FILE} cannot be written: {error}") from error
    print_tactics(directory)
