"""In the server: a model in its own process, which is restarted if it dies.

Its requests are answered with an error; requests that arrive in the meantime wait for the new process, unless that
cannot start either.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial

from llmserve.backends.python.host import ModelSpec
from llmserve.backends.python.instance import Done, Kill
from llmserve.backends.python.line import ServerLine
from llmserve.backends.python.local_server import LocalServer
from llmserve.backends.python.process import messages as m
from llmserve.backends.python.process.environment import Environment
from llmserve.backends.python.process.life import Batch, Life
from llmserve.backends.python.process.supervisor import Supervisor
from llmserve.errors import InternalError, Unavailable
from llmserve.serving.streams import Outbox
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


class ProcessState(Enum):
    STARTING = auto()
    OPEN = auto()
    FAILED = auto()  # the last restart failed; others will follow
    ENDED = auto()


class ProcessHost:
    """See `instance.Host` and `supervisor.Supervised`."""

    def __init__(self, spec: ModelSpec, server: LocalServer, environment: Environment | None = None) -> None:
        self.is_async = False
        self.queues = False  # batches that it has, which die with the process
        self._spec = spec
        self._server = server
        self._opened: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._state = ProcessState.STARTING
        self._life: Life | None = None
        self._waiting: list[Batch] = []  # for a process that can accept them
        self._unreleased: list[Done] = []  # of batches that died with a process
        self._problem = ""
        self._supervisor = Supervisor(spec, server, environment, self)

    def start(self) -> Future[None]:
        self._supervisor.start()
        return self._opened

    def submit(self, work: Sequence[tuple[InferRequest, ServerLine]], on_done: Done, outbox: Outbox) -> Kill:
        self._server.open(asyncio.get_running_loop())
        numbered = [(next(self._numbers), request, line) for request, line in work]
        message = m.Execute(next(self._numbers), tuple((number, request) for number, request, _ in numbered))
        batch = Batch({number: line for number, _, line in numbered}, message, on_done)
        for number, line in batch.lines.items():
            line.when_cancelled(partial(self._tell_cancelled, number))
        with self._lock:
            if self._state is ProcessState.STARTING:
                self._waiting.append(batch)
            elif self._state is ProcessState.OPEN and self._life is not None:
                self._life.execute(batch)
            else:
                self._refuse([batch])
        return partial(self._end_batch, batch)

    def alive(self) -> bool:
        return self._state is ProcessState.OPEN

    def problem(self) -> str:
        """A process that is being started already accepts requests: they wait for it."""
        return "" if self._state in (ProcessState.OPEN, ProcessState.STARTING) else self._problem

    def abandon(self) -> None:
        threading.Thread(target=self.stop, args=(0.0,), daemon=True).start()

    def stop(self, timeout_s: float) -> bool:
        with self._lock:
            self._state = ProcessState.ENDED
            self._supervisor.end()
            if self._life is not None:
                self._life.send(m.End())
        if self._supervisor.join(timeout_s):
            return True
        with self._lock:
            if self._life is not None:
                self._life.kill()
        self._supervisor.join()
        return False

    def _end_batch(self, batch: Batch, why: str) -> None:
        """End the batch, with its process if that has it."""
        with self._lock:
            if self._life is not None and self._life.kill_with(batch, why):
                return
            if batch not in self._waiting:
                return
            self._waiting.remove(batch)
        self._refuse([batch])

    def _tell_cancelled(self, number: int) -> None:
        with self._lock:
            if self._life is not None:
                self._life.tell_cancelled(number)

    # called by the supervisor

    def began(self, life: Life) -> None:
        with self._lock:
            self._life = life
            if self._state is ProcessState.ENDED:
                life.kill()

    def opened(self, life: Life, is_async: bool) -> None:
        self.is_async = is_async
        with self._lock:
            if self._state is not ProcessState.ENDED:
                self._state = ProcessState.OPEN
            waiting, self._waiting = self._waiting, []
            for batch in waiting:
                life.execute(batch)
        self._release()
        if not self._opened.done():
            self._opened.set_result(None)

    def failed(self, problem: str, error: Exception | None = None) -> None:
        """Requests do not wait for the next attempt."""
        if not self._opened.done():
            self._opened.set_exception(error or self._error(problem))
            return
        with self._lock:
            self._problem = problem
            if self._state is not ProcessState.ENDED:
                self._state = ProcessState.FAILED
            waiting, self._waiting = self._waiting, []
        logger.error("model instance '%s' could not be started again: %s", self._spec.instance_name, problem)
        self._refuse(waiting)
        self._release()

    def died(self, life: Life, how: str) -> None:
        """End the process's requests with an error. If it could accept requests, later ones wait for the next one."""
        with self._lock:
            self._life = None
            state = self._state
            if state is ProcessState.OPEN:
                self._state = ProcessState.STARTING
                self._problem = f"its process {how} and is being restarted"
            elif state is ProcessState.ENDED:
                self._problem = f"its process {how}"
            lines, unreleased = life.left()
            self._unreleased += unreleased
        for line in lines:
            line.post(self._failure())
        if state is ProcessState.OPEN:
            logger.warning("model instance '%s': %s", self._spec.instance_name, self._problem)
        elif not (life.has_answered or state is ProcessState.ENDED):
            self.failed(f"its process {how} while the model was loaded")

    def goes_on(self) -> bool:
        """Not after its end, nor if the model could never be opened."""
        return self._state is not ProcessState.ENDED and self._opened.exception() is None

    def ended(self) -> None:
        self._release()

    def _release(self) -> None:
        with self._lock:
            unreleased, self._unreleased = self._unreleased, []
        for on_done in unreleased:
            on_done(None)

    def _refuse(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            for line in batch.lines.values():
                line.post(self._failure())
            batch.on_done(None)

    def _failure(self) -> InferResponse:
        error = Unavailable(f"model instance '{self._spec.instance_name}': {self._problem}")
        return InferResponse(self._spec.model_name, self._spec.version, error=error, final=True)

    def _error(self, problem: str) -> InternalError:
        return InternalError(f"model instance '{self._spec.instance_name}': {problem}")
