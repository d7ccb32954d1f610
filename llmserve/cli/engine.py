"""`llmserve engine`: runs an engine in its own process, for several servers (`llmserve serve --engine-socket`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
from dataclasses import dataclass
from pathlib import Path

import typer

from llmserve.cli.dataclass_command import DataclassCommand, option
from llmserve.cli.engine_flags import OpenedEngineOptions, draft_settings, engine_option
from llmserve.cli.stop_signals import StopSignals, unless
from llmserve.engine.remote.child import MAX_PATH_BYTES
from llmserve.engine.settings import AdapterLimits, EngineSettings, GpuSettings
from llmserve.errors import AlreadyExists, InvalidArgument

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SharedEngineOptions(OpenedEngineOptions):
    socket: Path = option(..., "Unix socket to create; only this user can connect.")
    kv_cache_dir: Path | None = engine_option(
        None, "Folder for KV blocks that do not fit in the cache; reused after a restart."
    )
    kv_cache_disk_size: int | None = engine_option(None, "Maximum bytes in that folder.", min=1, show_default="10 GiB")
    max_adapters: int = engine_option(AdapterLimits().count, "Maximum number of adapters in memory.", min=1)
    adapter_memory: int = engine_option(0, "Maximum memory of adapters in bytes.", min=0, show_default="no limit")

    def settings(self) -> EngineSettings:
        gpu = GpuSettings(
            kv_cache_dir=str(self.kv_cache_dir.absolute()) if self.kv_cache_dir else "",
            kv_cache_disk_size=self.kv_cache_disk_size,
            draft_engine=draft_settings(self.draft_engine),
        )
        return EngineSettings(
            threads=self.threads, max_kv_tokens=self.max_kv_tokens, kv_cache_fraction=self.kv_cache_fraction,
            scheduler=self.scheduler, gpu=gpu, max_adapters=self.max_adapters, adapter_memory=self.adapter_memory,
        )  # fmt: skip


def engine(options: SharedEngineOptions) -> None:
    """Open an engine for the servers that connect to a socket: llmserve serve ENGINE --engine-socket PATH."""
    settings = options.settings()
    check_socket(options.socket)
    raise typer.Exit(asyncio.run(_serve(options.engine, options.socket, settings, options.drain_s)))


command = DataclassCommand(SharedEngineOptions, engine)


def check_socket(path: Path) -> None:
    """Raises `AlreadyExists` if an engine answers or a file exists there, `InvalidArgument` for an unusable path."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise InvalidArgument(f"--socket {path}: the path of a Unix socket has at most {MAX_PATH_BYTES} bytes")
    if not path.parent.is_dir():
        raise InvalidArgument(f"--socket {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidArgument(f"--socket {path}: the folder {path.parent} is not writable")
    if not path.exists():
        return
    if not path.is_socket():
        raise AlreadyExists(f"--socket {path} is a file; give another path")
    with sockets.socket(sockets.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:  # left by a process that ended
            return
        except PermissionError as error:
            raise InvalidArgument(f"--socket {path} belongs to another user; give another path") from error
    raise AlreadyExists(f"an engine already listens at {path}; give another --socket")


async def _serve(path: Path, socket: Path, settings: EngineSettings, drain_s: float) -> int:
    """Serve, and return the exit code: 0 after a signal, 1 if the engine has failed."""
    from llmserve.cli.engine_process import until_gone
    from llmserve.engine.open import open_engine
    from llmserve.engine.remote.server import EngineServer
    from llmserve.errors import Unavailable
    from llmserve.stages.guides import GuidesOfDirectory

    signals = StopSignals()
    with signals.installed():
        engine = await asyncio.to_thread(open_engine, path, settings)
        server = EngineServer(engine, compile_guide=GuidesOfDirectory(path, engine.info.vocab_size).compiled)
        is_ours = False
        try:
            await asyncio.to_thread(check_socket, socket)  # another engine may have started there meanwhile
            await server.serve(socket)
            is_ours = True
            typer.echo(f"Engine {engine.info.name} ({engine.info.digest[:12]}) at {socket}")
            code = await until_gone(engine, signals.drain)
            if signals.drain.is_set():
                await unless(signals.hurry, server.drain(drain_s))
            return code
        finally:
            await server.close(Unavailable("the engine's process ends"))
            if is_ours:
                socket.unlink(missing_ok=True)  # noqa: ASYNC240 - no client is served any more
            await asyncio.to_thread(engine.close)
