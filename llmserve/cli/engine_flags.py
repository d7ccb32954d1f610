"""Flags of the commands that open an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llmserve.errors import InvalidArgument
from llmserve.scheduler.drafts.drafter import Speculation

ENGINE = "Engine"
SPECULATION_HELP = "Drafters, with commas between them: lookup, grammar, draft; or off. Answers stay the same."
DRAFT_HELP = "Directory of a smaller engine with the same tokenizer, which drafts tokens (drafter draft)."
DraftEngine = Annotated[Path | None, typer.Option(help=DRAFT_HELP, show_default=False)]


def draft_settings(draft_engine: Path | None) -> str:
    """As `GpuSettings.draft_engine`."""
    return str(draft_engine.absolute()) if draft_engine else ""


def speculation_flag(text: str) -> Speculation:
    try:
        return Speculation.read(text)
    except ValueError as error:
        raise InvalidArgument(f"--speculation {text!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Of `llmserve serve`."""

    threads: Annotated[
        int | None, typer.Option(help="Engine threads.", min=1, show_default="every core", rich_help_panel=ENGINE)
    ] = None
    max_kv_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in the KV cache.", min=1, show_default="what the batch can use", rich_help_panel=ENGINE
        ),
    ] = None
    kv_cache_fraction: Annotated[
        float | None,
        typer.Option(
            help="Most of the free memory that the KV cache may take.", show_default="0.9", rich_help_panel=ENGINE
        ),
    ] = None
    kv_cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for KV blocks that do not fit the cache; a restart finds them.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    kv_cache_disk_size: Annotated[
        int | None,
        typer.Option(help="Most bytes of that folder.", min=1, show_default="10 GiB", rich_help_panel=ENGINE),
    ] = None
    speculation: Annotated[
        str | None,
        typer.Option(
            help=SPECULATION_HELP,
            show_default="lookup,grammar,draft",
            rich_help_panel=ENGINE,
        ),
    ] = None
    draft_engine: Annotated[Path | None, typer.Option(help=DRAFT_HELP, show_default=False, rich_help_panel=ENGINE)] = (
        None
    )
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=DIR: serve a LoRA adapter as a model of its own; may be repeated.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    adapters: Annotated[
        Path | None,
        typer.Option(
            help="Folder of adapter directories, each a model with its name; --model-control-mode poll looks again.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    max_adapters: Annotated[
        int | None,
        typer.Option(help="Most adapters in memory.", min=1, show_default="64", rich_help_panel=ENGINE),
    ] = None
    adapter_memory: Annotated[
        int | None,
        typer.Option(help="Most bytes of memory for adapters.", min=1, show_default="no limit", rich_help_panel=ENGINE),
    ] = None
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process",
            help="Run each engine in its own process, and restart it when it dies.",
            rich_help_panel=ENGINE,
        ),
    ] = False
    engine_socket: Annotated[
        Path | None,
        typer.Option(
            help="Socket of llmserve engine ENGINE: get tokens from there; no engine runs here.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = None
    cluster: Annotated[
        str,
        typer.Option(
            help="NAMESPACE.NAME[,KEY=VALUE]: get tokens from these workers; no engine runs here.",
            show_default=False,
            rich_help_panel=ENGINE,
        ),
    ] = ""
    parameter: Annotated[
        list[str] | None,
        typer.Option(help="MODEL.KEY=VALUE: a model's parameter; may be repeated.", rich_help_panel=ENGINE),
    ] = None
    require_gate: Annotated[
        list[str] | None,
        typer.Option(
            help="Suite that every engine and adapter must have passed; without a value, or any: any suite; "
            "may be repeated.",
            rich_help_panel=ENGINE,
        ),
    ] = None
    verify_engine_every: Annotated[
        float,
        typer.Option(
            help="Seconds between hashes of an engine's files; a changed engine is not ready; 0: never.",
            min=0,
            rich_help_panel=ENGINE,
        ),
    ] = 0
    gate_key: Annotated[
        list[Path] | None,
        typer.Option(help="Public key (PEM) that signed the gate's records; may be repeated.", rich_help_panel=ENGINE),
    ] = None
