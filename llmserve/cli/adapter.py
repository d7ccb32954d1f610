"""`llmserve adapter`: compiles or verifies a LoRA adapter for an engine that is already built."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llmserve.builder.adapter import build_adapter
from llmserve.cli.termination import terminated_as_exception
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.verify import verify_adapter
from llmserve.errors import InvalidArgument


class Action(StrEnum):
    BUILD = "build"
    VERIFY = "verify"


def command(
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    adapter: Annotated[
        Path, typer.Argument(help="build: folder that PEFT saved; verify: adapter directory.", show_default=False)
    ],
    engine: Annotated[Path, typer.Option(help="Engine directory that the adapter is for.", show_default=False)],
    output_dir: Annotated[
        Path | None, typer.Option(help="Adapter directory (default: adapters/ADAPTER-ENGINE)", show_default=False)
    ] = None,
) -> None:
    """Compile a LoRA adapter of PEFT into an adapter directory for one engine; or hash such a directory's files, and
    run its self-test on this machine (exit code 1 when that fails)."""
    if action is Action.VERIFY:
        if output_dir is not None:
            raise InvalidArgument("--output-dir is for adapter build; leave it out")
        raise typer.Exit(_verified(adapter, engine))
    output = output_dir or Path("adapters", f"{adapter.resolve().name}-{engine.resolve().name}")
    with terminated_as_exception():
        manifest = build_adapter(adapter, engine, output)
    size = f"{manifest.num_bytes / 2**20:.1f} MiB"
    typer.echo(f"{output}: rank {manifest.rank}, {len(manifest.parts)} matrices, {manifest.dtype}, {size}")
    typer.echo(f"for the engine {manifest.base_digest}")
    typer.echo(f"adapter digest {manifest.adapter_digest}")


def _verified(adapter: Path, engine: Path) -> int:
    """Verify the adapter and return the exit code."""
    result = verify_adapter(SealedAdapter.open(adapter), EngineDirectory.open(engine))
    typer.echo(f"{adapter}: every file is unchanged; {result or 'it has no self-test; rebuild it to add one'}")
    return 0 if result is None or result.passed else 1
