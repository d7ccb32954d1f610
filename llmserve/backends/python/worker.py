"""The thread of one model instance: it makes the model, runs its batches one after the other, and finalizes it.

A model with an `async def execute` gets an event loop of its own in that thread. Threads are daemons: a model that
hangs keeps neither the server nor its shutdown waiting.
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
        """`on_death` is called on the thread when it can serve no more although nobody has asked it to end."""
        self.is_async = False  # known once it is open
        self.model: Any = None  # from then on, for as long as it lives
        self._name = name
        self._open_model = open_model
        self._on_death = on_death
        self._is_alive = False  # to ask the thread costs more, and is done for every request
        self.opened: Future[None] = Future()  # done when the model is initialized; carries its exception
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._put: Callable[[Batch | None], None] = self._inbox.put
        self._thread = threading.Thread(target=self.run, name=f"model-{name}", daemon=True)

    def start(self) -> Future[None]:
        """`run` in a thread of its own."""
        self._is_alive = True
        self._thread.start()
        return self.opened

    def submit(self, batch: Batch) -> None:
        self._put(batch)

    def alive(self) -> bool:
        return self._is_alive

    def submit_end(self) -> None:
        """After the batches that wait, finalize."""
        self._put(None)

    def stop(self, timeout_s: float) -> bool:
        """`submit_end` and wait. False when the model is still busy after `timeout_s`."""
        self.submit_end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def run(self) -> None:
        """The model's whole life."""
        asyncio.set_event_loop(loop := asyncio.new_event_loop())  # as in a main thread: models may ask for it
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
        except BaseException as error:  # border: handed to whoever loads the model
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
        except BaseException:  # border: such as sys.exit() in a task that the model has started itself
            logger.exception("model instance '%s' has stopped working", self._name)
            self._is_alive = False
            self._on_death()

    def _finalize(self, model: Any) -> None:
        finalize = getattr(model, "finalize", None)
        if finalize is not None:
            try:
                finalize()
            except BaseException:  # border: a model that fails to clean up must not stop the others
                logger.exception("model instance '%s': finalize failed", self._name)

    def _serve(self, model: Any) -> None:
        self.opened.set_result(None)
        while (batch := self._inbox.get()) is not None:
            batch.run(model)
            del batch  # what the model has dropped must not live on here until the next one comes

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
    with suppress(RuntimeError):  # the loop is closed: the instance has died, and says so itself
        loop.call_soon_threadsafe(inbox.put_nowait, item)
