"""`GET :8002/metrics`, Prometheus text. Any other path on that port is an empty 200, as scrapers of Triton expect."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from llmserve.frontends.door import Core
from llmserve.frontends.listener import HttpServer, listen


def metrics_app(core: Core) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        text = core.metrics_text() if scope["path"] == "/metrics" else ""
        await Response(text, media_type="text/plain; charset=utf-8")(scope, receive, send)

    return app


async def start_metrics(core: Core, host: str, port: int) -> HttpServer:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken."""
    return await listen(metrics_app(core), host, port, flag="--metrics-port")
