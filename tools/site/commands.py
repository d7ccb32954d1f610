"""Every command of `llmserve` with its flags, from `--help`."""

from __future__ import annotations

from typing import Any

import typer

from llmserve.cli.app import app

COLUMNS = 100


def command_reference() -> str:
    program: Any = typer.main.get_command(app)
    parts = ["# Commands\n", "The output of `llmserve COMMAND --help`.\n"]
    for name, command in program.commands.items():
        context = command.make_context(name, [], parent=_context(program), resilient_parsing=True)
        parts.append(f"## llmserve {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def _context(program: Any) -> Any:
    return program.context_class(program, info_name="llmserve", terminal_width=COLUMNS, max_content_width=COLUMNS)
