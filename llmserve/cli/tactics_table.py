"""Prints the tactics that an engine uses on this machine, as a table."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for


def print_tactics(directory: EngineDirectory) -> None:
    tactics = runtime_for(directory.manifest.target).tactics(directory)
    if not tactics.layers:
        typer.echo(f"tactics: {tactics.about}")
        return
    table = Table(title=tactics.about, title_justify="left", box=None)
    for column in ("layers", "rows up to", "tactic", "why"):
        table.add_column(column, no_wrap=column != "why")
    for shape, choices in tactics.layers.items():
        for choice in choices:
            rows = str(choice.rows) if choice is not choices[-1] else "any"
            table.add_row(shape if choice is choices[0] else "", rows, choice.tactic, choice.reason)
    Console(highlight=False).print(table)
