"""`llmserve worker`: an engine as a worker of a cluster of NVIDIA Dynamo."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from llmserve.cli.dataclass_command import DataclassCommand, option
from llmserve.cli.engine_flags import OpenedEngineOptions, draft_settings
from llmserve.cluster.address import PLANES
from llmserve.cluster.settings import WorkerSettings
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import InvalidArgument, Unsupported

DISCOVERY, REQUEST_PLANES, EVENT_PLANES = PLANES["discovery"], PLANES["request_plane"], PLANES["event_plane"]
MISSING = "llmserve worker needs NVIDIA Dynamo, in its own environment: see docs/cluster.md"


cluster_option = partial(option, panel="Cluster")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(OpenedEngineOptions):
    """Dynamo's environment variables, which its operator sets for every pod, also set defaults."""

    name: str = cluster_option("", "Model name for clients.", show_default="the directory's")
    namespace: str = cluster_option("dynamo", "Of the cluster.", envvar="DYN_NAMESPACE")
    component: str = cluster_option("", "Component of the cluster; one per model.", show_default="the name")
    discovery_backend: str = cluster_option(
        "file", f"How workers are found: {', '.join(DISCOVERY)}.", envvar="DYN_DISCOVERY_BACKEND"
    )
    request_plane: str = cluster_option(
        "tcp", f"How requests arrive: {', '.join(REQUEST_PLANES)}.", envvar="DYN_REQUEST_PLANE"
    )
    event_plane: str = cluster_option(
        "zmq", f"How the router learns about blocks: {', '.join(EVENT_PLANES)}.", envvar="DYN_EVENT_PLANE"
    )
    without_migration: bool = cluster_option(
        False,
        "Accept presence and frequency penalties; use it with front ends without --migration-limit.",
        "--without-migration",
    )

    def settings(self) -> WorkerSettings:
        return WorkerSettings(
            engine=self.engine, name=self.name, namespace=self.namespace, component=self.component,
            discovery=self.discovery_backend, request_plane=self.request_plane, event_plane=self.event_plane,
            migrates=not self.without_migration, drain_s=self.drain_s,
            settings=EngineSettings(
                threads=self.threads, max_kv_tokens=self.max_kv_tokens, kv_cache_fraction=self.kv_cache_fraction,
                scheduler=self.scheduler, gpu=GpuSettings(draft_engine=draft_settings(self.draft_engine)),
            ),
        )  # fmt: skip


def worker(options: WorkerOptions) -> None:
    """Run as a worker of NVIDIA Dynamo until SIGTERM; Dynamo's variables (DYN_...) set the addresses."""
    for flag, value, known in (
        ("discovery-backend", options.discovery_backend, DISCOVERY),
        ("request-plane", options.request_plane, REQUEST_PLANES),
        ("event-plane", options.event_plane, EVENT_PLANES),
    ):
        if value not in known:
            raise InvalidArgument(f"--{flag} {value} is unknown; use {', '.join(known)}")
    settings = options.settings()
    logging.getLogger("llmserve").setLevel(logging.INFO)
    try:
        from llmserve.cluster.worker import serve_worker
    except ImportError as error:
        raise Unsupported(f"{MISSING} ({error})") from None
    serve_worker(settings)


command = DataclassCommand(WorkerOptions, worker)
