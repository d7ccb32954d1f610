"""`GET :8002/metrics`, Prometheus text. Any other path on that port is an empty 200, as scrapers of Triton expect."""

from __future__ import annotations

import ssl

from llmserve.frontends.shared.server_core import Core
from llmserve.wire.http1.answers import Answer, WholeAnswer
from llmserve.wire.http1.request import Request
from llmserve.wire.http1.server import HttpServer, serve


async def start_metrics(core: Core, host: str, port: int, tls: ssl.SSLContext | None = None) -> HttpServer:
    """Listen on `host:port` (0: any free port); `Unavailable` when the port is taken."""

    async def answer(request: Request) -> Answer:
        text = core.metrics_text() if request.path == "/metrics" else ""
        return WholeAnswer(text.encode(), content_type="text/plain; charset=utf-8")

    return await serve(answer, host, port, flag="--metrics-port", tls=tls)
