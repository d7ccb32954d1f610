"""`llmserve engine`: an engine in a process of its own, for several servers (`llmserve serve --engine-socket`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
from pathlib import Path
from typing import Annotated

import typer

from llmserve.cli.engine_flags import SPECULATION_HELP, DraftEngine, draft_settings, speculation_flag
from llmserve.cli.stop_signals import StopSignals, unless
from llmserve.engine.settings import AdapterLimits, EngineSettings, GpuSettings
from llmserve.errors import AlreadyExists, InvalidArgument
from llmserve.scheduler.settings import SchedulerSettings

MAX_PATH_BYTES = 107  # of a Unix socket's
DEFAULTS = SchedulerSettings()

logger = logging.getLogger(__name__)


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory, made by llmserve build.")],
    socket: Annotated[Path, typer.Option(help="Unix socket to make; only this user can connect.")],
    threads: Annotated[int, typer.Option(help="Engine threads; 0: every core.", min=0)] = 0,
    max_kv_tokens: Annotated[int, typer.Option(help="Tokens in the KV cache; 0: what the batch can use.", min=0)] = 0,
    kv_cache_fraction: Annotated[float, typer.Option(help="Most of the free memory that the KV cache may take.")] = 0.9,
    kv_cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for KV blocks that do not fit the cache; a restart finds them.", show_default=False),
    ] = None,
    kv_cache_disk_size: Annotated[
        int | None, typer.Option(help="Most bytes of that folder.", min=1, show_default="10 GiB")
    ] = None,
    max_queue_size: Annotated[int, typer.Option(help="Most requests that wait.", min=0)] = DEFAULTS.max_queue_size,
    speculation: Annotated[str, typer.Option(help=SPECULATION_HELP)] = DEFAULTS.speculation.words(),
    draft_engine: DraftEngine = None,
    max_adapters: Annotated[int, typer.Option(help="Most adapters in memory.", min=1)] = AdapterLimits().count,
    adapter_memory: Annotated[
        int, typer.Option(help="Most bytes of memory for adapters.", min=0, show_default="no limit")
    ] = 0,
    drain_s: Annotated[
        float, typer.Option("--drain-seconds", help="Seconds for running answers after SIGTERM.", min=0)
    ] = 30.0,
) -> None:
    """Open an engine for the servers that connect to a socket: llmserve serve ENGINE --engine-socket PATH."""
    scheduler = SchedulerSettings(max_queue_size=max_queue_size, speculation=speculation_flag(speculation))
    settings = EngineSettings(
        threads=threads, max_kv_tokens=max_kv_tokens, kv_cache_fraction=kv_cache_fraction, scheduler=scheduler,
        gpu=GpuSettings(
            kv_cache_dir=str(kv_cache_dir.absolute()) if kv_cache_dir else "", kv_cache_disk_size=kv_cache_disk_size,
            draft_engine=draft_settings(draft_engine),
        ),
        max_adapters=max_adapters, adapter_memory=adapter_memory,
    )  # fmt: skip
    check_socket(socket)
    raise typer.Exit(asyncio.run(_serve(engine, socket, settings, drain_s)))


def check_socket(path: Path) -> None:
    """Raises `AlreadyExists` where an engine answers or a file is, `InvalidArgument` for an unusable path."""
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
        except ConnectionRefusedError:  # of a process that is gone
            return
        except PermissionError as error:
            raise InvalidArgument(f"--socket {path} belongs to another user; give another path") from error
    raise AlreadyExists(f"an engine answers at {path} already; give another --socket")


async def _serve(path: Path, socket: Path, settings: EngineSettings, drain_s: float) -> int:
    """The exit code: 0 when it was told to go, 1 when the engine has failed."""
    from llmserve.cli.engine_process import until_gone
    from llmserve.engine.open import open_engine
    from llmserve.engine.remote.server import EngineServer
    from llmserve.errors import Unavailable
    from llmserve.stages.guides import GuidesOfDirectory

    signals = StopSignals()
    with signals.installed():
        engine = await asyncio.to_thread(open_engine, path, settings)
        server = EngineServer(engine, compile_guide=GuidesOfDirectory(path, engine.info.vocab_size).compiled)
        try:
            await server.serve(socket)
            typer.echo(f"Engine {engine.info.name} ({engine.info.digest[:12]}) at {socket}")
            code = await until_gone(engine, signals.drain)
            if signals.drain.is_set():
                await unless(signals.hurry, server.drain(drain_s))
            return code
        finally:
            await server.close(Unavailable("the engine's process ends"))
            socket.unlink(missing_ok=True)  # noqa: ASYNC240 - nobody is served any more
            await asyncio.to_thread(engine.close)
