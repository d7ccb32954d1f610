"""`llmserve doctor`: reports what this machine has, what each target needs, what is missing and what to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from llmserve.cli.facts_table import facts_table
from llmserve.cli.machine import Fact, machine_facts
from llmserve.cli.targets import check_targets, works
from llmserve.engine.registry import DEFAULT_TARGET, RUNTIMES
from llmserve.engine.runtime import Check
from llmserve.errors import InvalidArgument

ADVICE_INDENT = 4


def command(
    target: Annotated[str, typer.Option(help=f"Target of the exit code: {', '.join(RUNTIMES)}.")] = (DEFAULT_TARGET),
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show what this machine has and what each target lacks; exit code 1 if the target does not work here."""
    if target not in RUNTIMES:
        raise InvalidArgument(f"--target {target}: targets are {', '.join(RUNTIMES)}")
    facts, targets = machine_facts(), check_targets()
    if as_json:
        typer.echo(json.dumps(_as_json(facts, targets), indent=2))
    else:
        _print(facts, targets)
    if not works(targets[target]):
        raise typer.Exit(1)


def _as_json(facts: Sequence[Fact], targets: Mapping[str, Sequence[Check]]) -> dict[str, object]:
    return {
        "machine": {fact.name: fact.data for fact in facts},
        "default_target": DEFAULT_TARGET,
        "targets": {
            name: {"works": works(checks), "checks": [dataclasses.asdict(check) for check in checks]}
            for name, checks in targets.items()
        },
    }


def _print(facts: Sequence[Fact], targets: Mapping[str, Sequence[Check]]) -> None:
    console = Console(highlight=False)
    console.print(facts_table((fact.name, fact.text) for fact in facts))
    for name, checks in targets.items():
        is_default = " (the default)" if name == DEFAULT_TARGET else ""
        verdict = "works here" if works(checks) else "does not work here"
        console.print(f"\n[bold]target {name}[/bold]{is_default}: {verdict}")
        _print_checks(console, checks)


def _print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print the checks. Advice uses the full width, because it is usually a command."""
    width = max(len(check.need) for check in checks)
    for check in checks:
        row = Table(box=None, show_header=False, pad_edge=False)
        mark = Text("  ok     ") if check.is_met else Text("  missing", "bold")
        row.add_row(mark, Text(check.need.ljust(width), no_wrap=True), Text(check.found, overflow="fold"))
        console.print(row)
        if check.advice:
            console.print(Padding(Text(f"-> {check.advice}"), (0, 0, 0, ADVICE_INDENT)))
