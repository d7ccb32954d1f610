"""One server process from start to exit: listen, load, serve, drain.

Ports are opened first: a port in use is an error before anything is loaded, and health requests are answered during
loading. SIGTERM and SIGINT drain: the server reports not ready at once. After the shutdown delay, it rejects new
requests, and running ones may finish until the exit timeout. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
import textwrap
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from llmserve.cli.stop_signals import StopSignals, unless
from llmserve.frontends.grpc.inference_service import start_grpc
from llmserve.frontends.http.inference_api import start_http
from llmserve.frontends.http.metrics_port import start_metrics
from llmserve.frontends.page.web_page import web_page
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.text.front_end import text_apis
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ModelStatus, ServerSettings
from llmserve.wire.http2.keepalive import ConnectionLimits
from llmserve.wire.listener import url_host

STATUS_WIDTH = 100
METRICS = "Metrics Service"  # a server has started when it reports this address


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int  # 0: any free one
    shared: bool = False  # with other processes


@dataclass(frozen=True, slots=True)
class Listen:
    """Addresses to listen on; None: no such port."""

    http: Address | None
    grpc: Address | None
    metrics: Address | None
    max_input_bytes: int
    grpc_limits: ConnectionLimits
    grpc_tls: ssl.SSLContext | None = None
    http_tls: ssl.SSLContext | None = None
    metrics_tls: ssl.SSLContext | None = None
    web_page: bool = True  # on the HTTP port


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """The parts of a server."""

    settings: ServerSettings
    backends: dict[str, Backend]
    listen: Listen
    exit_timeout_s: float
    shutdown_delay_s: float
    exit_on_error: bool = True
    extensions: Extensions = field(default_factory=Extensions)

    async def run(self) -> int:
        """Run until a signal. Returns the exit code: 0 after a drain, 1 if a model did not load."""
        # Every stream is closed by its owner, so the loop does not track each one; it still closes forgotten ones.
        sys.set_asyncgen_hooks(firstiter=None)
        core = InferenceCore(self.settings, self.backends, self.extensions.tenant_counters)
        signals = StopSignals()
        with signals.installed():
            async with AsyncExitStack() as front_ends:
                addresses = await self._start_front_ends(core, front_ends)
                try:
                    is_loaded = await unless(signals.drain, core.start())
                    if not is_loaded:
                        return 0
                    statuses = core.repository_index()
                    _say(model_table(statuses))
                    if self.exit_on_error and any(status.state not in ("READY", "") for status in statuses):
                        _say("error: not every model could be loaded; the table above says why")
                        return 1
                    _say("\n".join(addresses))
                    await signals.drain.wait()
                    await self._announce_end(core, signals)
                    _say(f"Draining: running requests may finish within {self.exit_timeout_s:g} s")
                finally:
                    await self._stop(core, signals, front_ends)
        return 0

    async def _start_front_ends(self, core: InferenceCore, started: AsyncExitStack) -> list[str]:
        """Start them, and return lines with their addresses. If one cannot start, the others are stopped."""
        listen, extensions, lines = self.listen, self.extensions, []
        started.callback(extensions.close)
        if listen.grpc is not None:
            grpc = await start_grpc(
                core,
                listen.grpc.host,
                listen.grpc.port,
                extensions=extensions,
                limits=listen.grpc_limits,
                tls=listen.grpc_tls,
                shared=listen.grpc.shared,
            )
            started.push_async_callback(grpc.stop)
            lines.append(started_line("GRPCInferenceService", listen.grpc.host, grpc.port, listen.grpc_tls))
        if listen.http is not None:
            http = await start_http(
                core,
                listen.http.host,
                listen.http.port,
                extensions=extensions,
                max_input_bytes=listen.max_input_bytes,
                tls=listen.http_tls,
                mounts=(text_apis, *([web_page] if listen.web_page else [])),
                shared=listen.http.shared,
            )
            started.push_async_callback(http.stop)
            lines.append(started_line("HTTPService", listen.http.host, http.port, listen.http_tls))
        if listen.metrics is not None:
            metrics = await start_metrics(core, listen.metrics.host, listen.metrics.port, listen.metrics_tls)
            started.push_async_callback(metrics.stop)
            lines.append(started_line(METRICS, listen.metrics.host, metrics.port, listen.metrics_tls))
        return lines

    async def _announce_end(self, core: InferenceCore, signals: StopSignals) -> None:
        """Only health reports it, so that load balancers switch over before a request is rejected."""
        core.leave()
        if self.shutdown_delay_s:
            _say(f"No longer ready; requests are accepted for another {self.shutdown_delay_s:g} s")
            await unless(signals.hurry, asyncio.sleep(self.shutdown_delay_s))

    async def _stop(self, core: InferenceCore, signals: StopSignals, front_ends: AsyncExitStack) -> None:
        stopping = asyncio.ensure_future(core.stop(self.exit_timeout_s))
        if not await unless(signals.hurry, asyncio.shield(stopping)):
            await front_ends.aclose()  # cancels running requests, so that the core need not wait
        await stopping


def started_line(service: str, host: str, port: int, tls: ssl.SSLContext | None) -> str:
    return f"Started {service} at {url_host(host)}:{port}{'' if tls is None else ' (TLS)'}"


def model_table(statuses: Sequence[ModelStatus]) -> str:
    """Triton's start-up table; a long reason is wrapped."""
    rows = [("Model", "Version", "Status")]
    for row in statuses:
        status = ": ".join(filter(None, (row.state or "not loaded", _one_line(row.reason))))
        first, *more = textwrap.wrap(status, STATUS_WIDTH, break_on_hyphens=False)
        rows += [(repr(row.name)[1:-1], row.version, first), *(("", "", line) for line in more)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(text: str) -> None:
    print(text, flush=True)
