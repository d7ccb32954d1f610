"""A model in a thread of the server, the default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from llmserve.backends.python.host import ModelHost, ModelSpec
from llmserve.backends.python.instance import Done, Kill
from llmserve.backends.python.line import ServerLine
from llmserve.backends.python.local_server import LocalServer
from llmserve.serving.streams import Outbox
from llmserve.serving.types import InferRequest, InferResponse
from llmserve.wire.request_memory import RequestMemory


class ThreadHost:
    """See `instance.Host`."""

    def __init__(
        self, spec: ModelSpec, server: LocalServer, on_death: Callable[[], None], memory: RequestMemory | None = None
    ) -> None:
        self._server = server
        self._host = ModelHost(spec, server, on_death=on_death, memory=memory)

    @property
    def is_async(self) -> bool:
        return self._host.is_async

    def start(self) -> Future[None]:
        return self._host.start()

    @property
    def queues(self) -> bool:
        """One after the other on the model's thread; an async model runs all its batches at the same time."""
        return not self._host.is_async

    def submit(self, work: Sequence[tuple[InferRequest, ServerLine]], on_done: Done, outbox: Outbox) -> Kill:
        self._server.open(asyncio.get_running_loop())
        self._host.submit(work, on_done, outbox)
        return lambda why: None  # a thread cannot be ended from outside

    @property
    def max_inline_bytes(self) -> int:
        return self._host.max_inline_bytes

    def execute_inline(self, request: InferRequest) -> InferResponse:
        self._server.open(asyncio.get_running_loop())
        return self._host.execute_inline(request)

    def alive(self) -> bool:
        return self._host.alive()

    def problem(self) -> str:
        return "" if self._host.alive() else "has stopped working; restart the server"

    def abandon(self) -> None:
        self._host.submit_end()
        self._host.forget()

    def stop(self, timeout_s: float) -> bool:
        stopped = self._host.stop(timeout_s)
        self._host.forget()
        return stopped
