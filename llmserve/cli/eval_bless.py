"""`llmserve eval bless`: approves a change of a suite's margins, prompt or data, and records the approval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmserve.cli.help import GroupedHelpCommand

BLESS = "bless"


def command(
    suite: Annotated[Path, typer.Argument(help="Suite file whose margins, prompt and data to approve.")],
    by: Annotated[str, typer.Option(help="Name of the approver.")],
    why: Annotated[str, typer.Option(help="Reason for the change.")],
    sign_key: Annotated[
        Path | None, typer.Option(help="Private key (PEM, Ed25519) that signs the line.", show_default=False)
    ] = None,
) -> None:
    """Approve the margins, prompt and data of SUITE. Logs next to it who approved them, why, and what changed."""
    from llmserve.evaluation.judging.blessing import bless, trace_of
    from llmserve.evaluation.suite import load_suite
    from llmserve.sealed_log import Signer

    changes = bless(
        suite, load_suite(suite), by=by, why=why, signer=Signer.load(sign_key) if sign_key is not None else None
    )
    typer.echo("\n".join(changes))
    typer.echo(f"written: {trace_of(suite)}")


class EvalOrBlessCommand(GroupedHelpCommand):
    """Runs `llmserve eval bless`, which has its own flags, or else an evaluation."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args[:1] != [BLESS]:
            return super().make_context(info_name, args, parent, **extra)
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(cls=GroupedHelpCommand)(command)
        return typer.main.get_command(app).make_context(f"{info_name} {BLESS}", args[1:], parent, **extra)
