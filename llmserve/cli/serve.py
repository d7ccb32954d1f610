"""`llmserve serve`: an engine through the packaged pipelines, or any Triton model repository."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmserve.errors import InvalidArgument

if TYPE_CHECKING:
    from llmserve.cli.server import ServerProcess

LOG_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
DEFAULT_MAX_INPUT_BYTES = 64 * 1024 * 1024


def command(
    engine: Annotated[Path | None, typer.Argument(help="Engine directory.", show_default=False)] = None,
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(help="Model repository; may be repeated.", show_default="the packaged one"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    http_port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0: any free port.", min=0, max=65535)] = 8002,
    threads: Annotated[int | None, typer.Option(help="Engine threads.", min=1, show_default="every core")] = None,
    max_kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens in the KV cache.", min=1, show_default="what the batch can use")
    ] = None,
    kv_cache_fraction: Annotated[
        float | None, typer.Option(help="Most of the free memory that the KV cache may take.", show_default="0.9")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option(help="MODEL.KEY=VALUE: a model's parameter; may be repeated.")
    ] = None,
    exit_timeout_secs: Annotated[float, typer.Option(help="How long running requests may finish.", min=0)] = 30,
    exit_on_error: Annotated[bool, typer.Option(help="End when a model does not load.")] = True,
    strict_readiness: Annotated[bool, typer.Option(help="Ready only when every model is.")] = True,
    http_max_input_size: Annotated[int, typer.Option(help="Bytes of an HTTP body.", min=1)] = DEFAULT_MAX_INPUT_BYTES,
    log_verbose: Annotated[int, typer.Option(help="0 warnings, 1 information, 2 everything.", min=0, max=2)] = 0,
) -> None:
    """Serve models over gRPC (8001), HTTP (8000) and metrics (8002), as Triton does."""
    # imported here: the other commands need neither gRPC nor HTTP
    from llmserve.cli.backends import make_backends
    from llmserve.cli.server import Listen, ServerProcess
    from llmserve.serving.settings import ServerSettings

    logging.getLogger("llmserve").setLevel(LOG_LEVELS[log_verbose])
    limits = {
        "num_threads": threads,
        "max_tokens_in_paged_kv_cache": max_kv_tokens,
        "kv_cache_free_gpu_mem_fraction": kv_cache_fraction,
    }
    repositories = find_repositories(engine, model_repository or ())
    settings = ServerSettings(
        model_repositories=repositories,
        parameter_overrides=find_overrides(repositories, engine, limits, parameter or ()),
        strict_readiness=strict_readiness,
    )
    listen = Listen(host, http_port, grpc_port, metrics_port, http_max_input_size)
    raise typer.Exit(run(ServerProcess(settings, make_backends(), listen, exit_timeout_secs, exit_on_error)))


def run(process: ServerProcess) -> int:
    return asyncio.run(process.run())


def find_repositories(engine: Path | None, repositories: Sequence[Path]) -> tuple[Path, ...]:
    """The repositories to serve; checks the engine directory, so that a wrong path is the first thing to be said."""
    from llmserve.cli.pipelines import packaged_repository
    from llmserve.engine.artifact import EngineDirectory

    if engine is None and not repositories:
        raise InvalidArgument("nothing to serve: give an engine directory, or --model-repository DIR")
    if engine is not None:
        EngineDirectory.open(engine)
    return tuple(repositories) or (packaged_repository(),)


def find_overrides(
    repositories: Sequence[Path],
    engine: Path | None,
    limits: dict[str, int | float | None],
    parameters: Sequence[str],
) -> dict[str, dict[str, str]]:
    """What the flags change in the configs of models."""
    from llmserve.cli.pipelines import engine_overrides

    given = {key: str(value) for key, value in limits.items() if value is not None}
    overrides = engine_overrides(repositories, engine, given)
    for text in parameters:
        name, dot, rest = text.partition(".")
        key, equals, value = rest.partition("=")
        if not (name and dot and key and equals):
            raise InvalidArgument(f"--parameter {text}: expected MODEL.KEY=VALUE, such as tensorrt_llm.num_threads=2")
        overrides.setdefault(name, {})[key] = value
    return overrides
