"""`llmserve adapter`: a LoRA adapter for an engine that has been built, to be served beside it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmserve.builder.adapter import build_adapter
from llmserve.cli.termination import terminated_as_exception


class Action(StrEnum):
    BUILD = "build"


def command(
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    adapter: Annotated[Path, typer.Argument(help="Folder that PEFT saved.", show_default=False)],
    engine: Annotated[Path, typer.Option(help="Engine directory to build the adapter for.", show_default=False)],
    output_dir: Annotated[
        Path | None, typer.Option(help="Adapter directory (default: adapters/ADAPTER-ENGINE)", show_default=False)
    ] = None,
) -> None:
    """Compile a LoRA adapter of PEFT into an adapter directory for one engine."""
    output = output_dir or Path("adapters", f"{adapter.resolve().name}-{engine.resolve().name}")
    with terminated_as_exception():
        manifest = build_adapter(adapter, engine, output)
    size = f"{manifest.num_bytes / 2**20:.1f} MiB"
    typer.echo(f"{output}: rank {manifest.rank}, {len(manifest.parts)} matrices, {manifest.dtype}, {size}")
    typer.echo(f"for the engine {manifest.base_digest}")
    typer.echo(f"adapter digest {manifest.adapter_digest}")
