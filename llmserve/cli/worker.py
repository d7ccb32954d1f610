"""`llmserve worker`: an engine as a worker of a cluster of NVIDIA Dynamo."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from llmserve.cli.engine_flags import DRAFT_HELP, SPECULATION_HELP, draft_settings, speculation_flag
from llmserve.cluster.address import PLANES
from llmserve.cluster.settings import WorkerSettings
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, Unsupported
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import SchedulerSettings

CLUSTER, ENGINE = "Cluster", "Engine"
DISCOVERY, REQUEST_PLANES, EVENT_PLANES = PLANES["discovery"], PLANES["request_plane"], PLANES["event_plane"]
MISSING = "llmserve worker needs NVIDIA Dynamo, in its own environment: see docs/cluster.md"


def from_dynamo(variable: str, help: str) -> Any:
    """An option whose default is a variable of Dynamo's, which its operator sets for every pod."""
    return typer.Option(help=help, envvar=variable, rich_help_panel=CLUSTER)


Namespace = Annotated[str, from_dynamo("DYN_NAMESPACE", "Of the cluster.")]
Discovery = Annotated[str, from_dynamo("DYN_DISCOVERY_BACKEND", f"How workers are found: {', '.join(DISCOVERY)}.")]
RequestPlane = Annotated[str, from_dynamo("DYN_REQUEST_PLANE", f"How requests come: {', '.join(REQUEST_PLANES)}.")]
EventPlane = Annotated[
    str, from_dynamo("DYN_EVENT_PLANE", f"How the router hears of blocks: {', '.join(EVENT_PLANES)}.")
]
DraftEngine = Annotated[Path | None, typer.Option(help=DRAFT_HELP, show_default=False, rich_help_panel=ENGINE)]
MAX_QUEUE_SIZE = SchedulerSettings().max_queue_size
QueueSize = Annotated[
    int,
    typer.Option(
        help="Most requests that wait; the front end sends others to another worker.", min=0, rich_help_panel=ENGINE
    ),
]


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory, made by llmserve build.")],
    name: Annotated[
        str, typer.Option(help="Model name for clients.", show_default="the directory's", rich_help_panel=CLUSTER)
    ] = "",
    namespace: Namespace = "dynamo",
    component: Annotated[
        str,
        typer.Option(help="Component of the cluster; one per model.", show_default="the name", rich_help_panel=CLUSTER),
    ] = "",
    discovery_backend: Discovery = "file",
    request_plane: RequestPlane = "tcp",
    event_plane: EventPlane = "zmq",
    without_migration: Annotated[
        bool,
        typer.Option(
            "--without-migration",
            help="Accept presence and frequency penalties; use it with front ends without --migration-limit.",
            rich_help_panel=CLUSTER,
        ),
    ] = False,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-seconds", help="Seconds for running answers after SIGTERM.", min=0, rich_help_panel=CLUSTER
        ),
    ] = 30.0,
    threads: Annotated[
        int, typer.Option(help="Engine threads; 0: every core that this process may use.", rich_help_panel=ENGINE)
    ] = 0,
    max_kv_tokens: Annotated[
        int, typer.Option(help="Tokens in the KV cache; 0: what the batch can use.", rich_help_panel=ENGINE)
    ] = 0,
    max_queue_size: QueueSize = MAX_QUEUE_SIZE,
    speculation: Annotated[str, typer.Option(help=SPECULATION_HELP, rich_help_panel=ENGINE)] = Speculation.ALL.words(),
    draft_engine: DraftEngine = None,
    kv_cache_fraction: Annotated[
        float, typer.Option(help="Most of the free memory that the KV cache may take.", rich_help_panel=ENGINE)
    ] = 0.9,
) -> None:
    """Run as a worker of NVIDIA Dynamo until SIGTERM; Dynamo's variables (DYN_...) set the addresses."""
    choices = {"discovery-backend": (discovery_backend, DISCOVERY), "request-plane": (request_plane, REQUEST_PLANES)}
    for flag, (value, known) in (choices | {"event-plane": (event_plane, EVENT_PLANES)}).items():
        if value not in known:
            raise InvalidArgument(f"--{flag} {value} is not known; use {', '.join(known)}")
    settings = WorkerSettings(
        engine=engine, name=name, namespace=namespace, component=component, discovery=discovery_backend,
        request_plane=request_plane, event_plane=event_plane, migrates=not without_migration, drain_s=drain_s,
        settings=EngineSettings(
            threads=threads, max_kv_tokens=max_kv_tokens, kv_cache_fraction=kv_cache_fraction,
            scheduler=SchedulerSettings(max_queue_size=max_queue_size, speculation=speculation_flag(speculation)),
            gpu=GpuSettings(draft_engine=draft_settings(draft_engine)),
        ),
    )  # fmt: skip
    logging.getLogger("llmserve").setLevel(logging.INFO)
    try:
        from llmserve.cluster.worker import serve_worker
    except ImportError as error:
        raise Unsupported(f"{MISSING} ({error})") from None
    serve_worker(settings)
