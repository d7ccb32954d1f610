"""The `llmserve` program: one small file per command, registered here under its own name.

Exit codes: 0 done; 1 the work failed or the gate said no; 2 the input was wrong.
"""

from __future__ import annotations

import logging
import sys

import typer

from llmserve import __version__
from llmserve.cli import (
    api_key,
    bench,
    build,
    chat,
    completion,
    doctor,
    eval,
    export,
    inspect,
    rollout,
    run,
    serve,
    tune,
    verify,
    worker,
)
from llmserve.cli.eval_bless import EvalCommand
from llmserve.cli.help import GroupedHelpCommand
from llmserve.cli.run_flags import RunCommand
from llmserve.errors import Code, LlmserveError

INPUT_CODES = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)

app = typer.Typer(
    name="llmserve",
    help="Compile a Hugging Face checkpoint into an engine, serve it like Triton, gate its quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # GroupedHelpCommand
)
CLASSES = {serve: serve.ServeCommand, run: RunCommand, eval: EvalCommand}
UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}  # the flags of trtllm-build and run.py
MODULES = (
    build, tune, run, serve, worker, rollout, chat, bench, eval, verify, inspect, export, api_key, doctor, completion,
)  # fmt: skip
for module in MODULES:
    command_class = CLASSES.get(module, GroupedHelpCommand)
    settings = UNDERSCORES if module in (build, run) else None
    app.command(module.__name__.rpartition(".")[2].replace("_", "-"), cls=command_class, context_settings=settings)(
        module.command
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmserve {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Entry point: an error of ours is one readable message, never a traceback."""
    try:
        app()
    except LlmserveError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if error.code in INPUT_CODES else 1)
