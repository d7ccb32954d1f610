"""The thread of one model instance: it creates the model, runs its batches one after the other, and finalizes it.

A model with an `async def execute` has its own event loop in that thread. Threads are daemons, so a model that hangs
does not block the server or its shutdown.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Batch(Protocol):
    def run(self, model: Any) -> None:
        """Execute a model's batch. Never raises."""
        ...

    async def run_async(self, model: Any) -> None: ...


class Worker:
    def __init__(self, name: str, open_model: Callable[[], Any], *, on_death: Callable[[], None]) -> None:
        """`on_death` is called on the thread if it can no longer serve, although it was not asked to end."""
        self.is_async = False  # known once it is open
        self.model: Any = None  # from then on until it ends
        self._name = name
        self._open_model = open_model
        self._on_death = on_death
        self._is_alive = False  # checking the thread costs more, and would be done for every request
        self.opened: Future[None] = Future()  # done when the model is initialized; otherwise has its exception
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._put: Callable[[Batch | None], None] = self._inbox.put
        self._thread = threading.Thread(target=self.run, name=f"model-{name}", daemon=True)

    def start(self) -> Future[None]:
        """Run `run` in a new thread."""
        self._is_alive = True
        self._thread.start()
        return self.opened

    def submit(self, batch: Batch) -> None:
        self._put(batch)

    def alive(self) -> bool:
        return self._is_alive

    def submit_end(self) -> None:
        """Finalize after the queued batches."""
        self._put(None)

    def stop(self, timeout_s: float) -> bool:
        """`submit_end`, and wait. False if the model is still busy after `timeout_s`."""
        self.submit_end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def run(self) -> None:
        """The model's whole life."""
        asyncio.set_event_loop(loop := asyncio.new_event_loop())  # as in a main thread: models may request it
        try:
            self._run()
        finally:
            self._is_alive = False
            self.model = None
            if not loop.is_running():  # in a thread of the model
                loop.close()

    def _run(self) -> None:
        try:
            self.model = model = self._open_model()
        except BaseException as error:  # border: passed to the caller that loads the model
            self.opened.set_exception(error)
            return
        self.is_async = inspect.iscoroutinefunction(model.execute)
        if self.is_async:
            with asyncio.Runner() as runner, self._death_reported():  # in this order: the runner's end cancels batches
                runner.run(self._serve_async(model))
        else:
            with self._death_reported():
                self._serve(model)
        self._finalize(model)

    @contextmanager
    def _death_reported(self) -> Generator[None, None, None]:
        try:
            yield
        except BaseException:  # border: for example sys.exit() in a task that the model started itself
            logger.exception("model instance '%s' has stopped working", self._name)
            self._is_alive = False
            self._on_death()

    def _finalize(self, model: Any) -> None:
        finalize = getattr(model, "finalize", None)
        if finalize is not None:
            try:
                finalize()
            except BaseException:  # border: a model that fails to clean up must not affect the others
                logger.exception("model instance '%s': finalize failed", self._name)

    def _serve(self, model: Any) -> None:
        self.opened.set_result(None)
        while (batch := self._inbox.get()) is not None:
            batch.run(model)
            del batch  # so that objects that the model dropped are freed before the next one

    async def _serve_async(self, model: Any) -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Batch | None] = asyncio.Queue()
        self._put = lambda batch: _put_soon(loop, inbox, batch)
        self.opened.set_result(None)
        async with asyncio.TaskGroup() as running:
            while (batch := await inbox.get()) is not None:
                running.create_task(batch.run_async(model))
                del batch


def _put_soon(loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Any], item: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: the instance has died, and reports this itself
        loop.call_soon_threadsafe(inbox.put_nowait, item)
