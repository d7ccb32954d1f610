"""`llmserve convert-checkpoint`: the first of TensorRT-LLM's two steps. Its folder has a recipe, but no weights.

`llmserve build --checkpoint-dir FOLDER` then reads the checkpoint itself, with the options of both command lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import typer
import yaml

from llmserve.builder.options import declared_options
from llmserve.builder.plan import plan_build
from llmserve.builder.recipe import CONVERTED_FILE
from llmserve.cli.build import FLAGS, CheckpointOptions
from llmserve.cli.dataclass_command import DataclassCommand, option
from llmserve.errors import AlreadyExists


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(CheckpointOptions):
    output_dir: Path = option(Path("tllm_checkpoint"), "Folder for --checkpoint-dir of the build.")


def convert(asked: ConvertOptions) -> None:
    """Check a checkpoint and its precision, and record both for llmserve build --checkpoint-dir."""
    source, recipe = asked.source()
    given = {name: getattr(asked, name) for name in declared_options() if getattr(asked, name) is not None}
    options = recipe.resolve(given)
    plan = plan_build(source, options, measure=lambda: 0.0)
    folder = asked.output_dir
    if others := [path.name for path in folder.iterdir() if path.name != CONVERTED_FILE] if folder.is_dir() else []:
        raise AlreadyExists(f"{folder} already holds {', '.join(sorted(others)[:3])}; choose an empty --output-dir")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONVERTED_FILE).write_text(_recipe(source, {**(recipe.options or {}), **given}))
    typer.echo(f"{folder}: {plan.architecture} {options.dtype}{options.quantization and '+' + options.quantization}")
    typer.echo(f"No weights were written. Build the engine with: llmserve build --checkpoint_dir {folder}")


def _recipe(source: Path, options: Mapping[str, Any]) -> str:
    """The recipe's text. Its paths are absolute; links are not resolved, because file names describe the content."""
    paths = {name for name, option in declared_options().items() if option.flag.is_path}
    kept = {name: os.path.abspath(value) if value and name in paths else value for name, value in options.items()}
    lines = yaml.safe_dump({"checkpoint": os.path.abspath(source), **kept}, sort_keys=False)
    return f"# Written by llmserve convert-checkpoint; llmserve build reads it.\n{lines}"


command = DataclassCommand(
    make_dataclass("ConvertCommandLine", (), bases=(ConvertOptions, FLAGS), frozen=True, kw_only=True), convert
)
