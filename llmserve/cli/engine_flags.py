"""Flags of the commands that open an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llmserve.cli.dataclass_command import argument, option
from llmserve.errors import InvalidArgument
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import SchedulerSettings

engine_option = partial(option, panel="Engine")
SPECULATION_HELP = "Drafters, separated by commas: lookup, grammar, history, draft; or off. Answers stay the same."
DRAFT_HELP = "Directory of a smaller engine with the same tokenizer, which drafts tokens (drafter draft)."


def draft_settings(draft_engine: Path | None) -> str:
    """The value of `GpuSettings.draft_engine`."""
    return str(draft_engine.absolute()) if draft_engine else ""


def speculation_flag(text: str) -> Speculation:
    try:
        return Speculation.read(text)
    except ValueError as error:
        raise InvalidArgument(f"--speculation {text!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class OpenedEngineOptions:
    """Options of the commands that open an engine for other processes, until SIGTERM."""

    engine: Path = argument(..., "Engine directory, made by llmserve build.")
    threads: int = engine_option(0, "Engine threads; 0: every core that this process may use.", min=0)
    max_kv_tokens: int = engine_option(0, "Tokens in the KV cache; 0: what the batch can use.", min=0)
    kv_cache_fraction: float = engine_option(0.9, "Largest fraction of the free memory that the KV cache may use.")
    max_queue_size: int = engine_option(
        SchedulerSettings().max_queue_size, "Maximum number of waiting requests; others are refused.", min=0
    )
    speculation: str = engine_option(Speculation.ALL.words(), SPECULATION_HELP)
    draft_engine: Path | None = engine_option(None, DRAFT_HELP)
    drain_s: float = engine_option(30.0, "Seconds for running answers after SIGTERM.", "--drain-seconds", min=0)

    @property
    def scheduler(self) -> SchedulerSettings:
        return SchedulerSettings(max_queue_size=self.max_queue_size, speculation=speculation_flag(self.speculation))


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Engine options of `llmserve serve`."""

    threads: int | None = engine_option(None, "Engine threads.", min=1, show_default="every core")
    max_kv_tokens: int | None = engine_option(
        None, "Tokens in the KV cache.", min=1, show_default="what the batch can use"
    )
    kv_cache_fraction: float | None = engine_option(
        None, "Largest fraction of the free memory that the KV cache may use.", show_default="0.9"
    )
    kv_cache_dir: Path | None = engine_option(
        None, "Folder for KV blocks that do not fit in the cache; reused after a restart."
    )
    kv_cache_disk_size: int | None = engine_option(None, "Maximum bytes in that folder.", min=1, show_default="10 GiB")
    speculation: str | None = engine_option(None, SPECULATION_HELP, show_default="lookup,grammar,history,draft")
    draft_engine: Path | None = engine_option(None, DRAFT_HELP)
    adapter: list[str] | None = engine_option(
        None, "NAME=DIR: serve a LoRA adapter as a separate model; may be repeated."
    )
    adapters: Path | None = engine_option(
        None, "Folder of adapter directories, each a model with its name; --model-control-mode poll looks again."
    )
    max_adapters: int | None = engine_option(None, "Maximum number of adapters in memory.", min=1, show_default="64")
    adapter_memory: int | None = engine_option(
        None, "Maximum memory of adapters in bytes.", min=1, show_default="no limit"
    )
    engine_process: bool = engine_option(
        False, "Run each engine in its own process, and restart it when it dies.", "--engine-process"
    )
    engine_socket: Path | None = engine_option(
        None, "Socket of llmserve engine ENGINE: get tokens from there; no engine runs here."
    )
    cluster: str = engine_option("", "NAMESPACE.NAME[,KEY=VALUE]: get tokens from these workers; no engine runs here.")
    parameter: list[str] | None = engine_option(None, "MODEL.KEY=VALUE: a model's parameter; may be repeated.")
    require_gate: list[str] | None = engine_option(
        None,
        "Suite that every engine and adapter must have passed; without a value, or any: any suite; may be repeated.",
    )
    verify_engine_every: float = engine_option(
        0, "Seconds between hashes of an engine's files; a changed engine is not ready; 0: never.", min=0
    )
    gate_key: list[Path] | None = engine_option(
        None, "Public key (PEM) for the signatures of gate records; may be repeated."
    )
