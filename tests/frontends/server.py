"""The three front ends over one core, on their own event loop in a thread, so that blocking clients can be tested."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llmserve.frontends.grpc.inference_service import start_grpc
from llmserve.frontends.http.inference_api import start_http
from llmserve.frontends.http.metrics_port import start_metrics
from llmserve.frontends.http.mounts import MakeMount
from llmserve.frontends.page.web_page import web_page
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.cross_origin import CrossOrigin
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.forwarded_headers import ForwardedHeaders
from llmserve.frontends.shared.log_settings import LogControl
from llmserve.frontends.shared.restrictions import Restrictions
from llmserve.frontends.shared.server_core import Core
from llmserve.frontends.shared.shared_memory import SharedMemory
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.shared.tracer import Tracer
from llmserve.frontends.text.front_end import text_apis
from llmserve.wire.request_memory import RequestMemory

HOST = "127.0.0.1"
MAX_INPUT_BYTES = 600_000
STRICT = TextSettings(refuses_unknown_fields=True)  # so that a test's misspelling is seen


@dataclass(frozen=True)
class RunningServer:
    core: Core
    extensions: Extensions
    loop: asyncio.AbstractEventLoop
    grpc_port: int
    http_port: int
    metrics_port: int

    @property
    def grpc(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"{HOST}:{self.http_port}"

    @property
    def http_url(self) -> str:
        return f"http://{self.http}"


@contextmanager
def running_server(
    make_core: Callable[[], Core],
    *,
    tracer: Tracer | None = None,
    headers: ForwardedHeaders | None = None,
    grpc_compression: int = 0,
    tls: ssl.SSLContext | None = None,
    requests: RequestMemory | None = None,
    restrictions: tuple[Restrictions, Restrictions] = (Restrictions(), Restrictions()),
    allows_shared_memory: bool = True,
    api_keys: ApiKeys | None = None,
    logs: LogControl | None = None,
    cross_origin: CrossOrigin | None = None,
    root_path: str = "",
    http_tls: ssl.SSLContext | None = None,
    mounts: Sequence[MakeMount] = (text_apis, web_page),
    text: TextSettings = STRICT,
) -> Iterator[RunningServer]:
    """`make_core` is called on the server's own loop. `restrictions`: those of HTTP, those of gRPC."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[RunningServer, Callable[[], object]]:
        core = make_core()
        forwarded = headers or ForwardedHeaders()
        extensions = Extensions(
            tracer=tracer or Tracer(),
            http_headers=forwarded,
            grpc_headers=forwarded,
            grpc_compression=grpc_compression,
            requests=requests or RequestMemory(),
            http_restrictions=restrictions[0],
            grpc_restrictions=restrictions[1],
            api_keys=api_keys,
            logs=logs or LogControl(),
            cross_origin=cross_origin or CrossOrigin(),
            root_path=root_path,
            text=text,
            memory=SharedMemory(allowed=allows_shared_memory),
        )
        grpc = await start_grpc(core, HOST, 0, extensions=extensions, tls=tls)
        http = await start_http(
            core, HOST, 0, extensions=extensions, max_input_bytes=MAX_INPUT_BYTES, tls=http_tls, mounts=mounts
        )
        metrics = await start_metrics(core, HOST, 0, http_tls)

        async def stop() -> None:
            await asyncio.gather(grpc.stop(), http.stop(), metrics.stop())
            extensions.close()
            await asyncio.gather(*extensions.background, return_exceptions=True)

        return RunningServer(core, extensions, loop, grpc.port, http.port, metrics.port), stop

    try:
        server, stop = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
        yield server
        asyncio.run_coroutine_threadsafe(stop(), loop).result(20)  # type: ignore[arg-type]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


def settled(count: Callable[[], int], *, at_most: int, quiet_s: float = 0.5) -> int:
    """The value at which `count` stops growing; it must not pass `at_most`."""
    while True:
        before = count()
        time.sleep(quiet_s)
        assert count() <= at_most, "it does not stop growing"
        if 0 < before == count():
            return before
