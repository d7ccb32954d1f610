"""A fake engine, served on a socket by a loop of its own."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.remote.server import ClientLimits, EngineServer


class Served:
    def __init__(self, engine: Engine, path: Path, limits: ClientLimits | None) -> None:
        self.engine = engine
        self.path = path
        self.server = EngineServer(engine, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self.server.serve(path))

    def call(self, work: Any) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(10)

    def close(self) -> None:
        self.call(self.server.close())
        self.call(asyncio.sleep(0.01))  # the connections hear of it
        self.engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def serving(engine: Engine | None = None, limits: ClientLimits | None = None) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="llmserve-test-") as folder:
        served = Served(engine or fake_engine(step_delay_s=0.001), Path(folder) / "engine.sock", limits)
        try:
            yield served
        finally:
            served.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as one:
        yield one
