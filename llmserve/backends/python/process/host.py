"""In the server: a model in a process of its own.

A thread starts the process, takes its messages, and starts it again when it has died. Requests that it had are answered
with an error; those that come meanwhile wait for the new one, unless that cannot be started either.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial

from llmserve.backends.python.host import ModelSpec
from llmserve.backends.python.instance import Done, Kill
from llmserve.backends.python.line import ServerLine
from llmserve.backends.python.local_server import LocalServer
from llmserve.backends.python.process import messages as m
from llmserve.backends.python.process.back_off import BackOff
from llmserve.backends.python.process.environment import Environment
from llmserve.backends.python.process.launch import ModelProcess
from llmserve.backends.python.process.life import Batch, Life
from llmserve.backends.python.process.server_calls import ServerCalls
from llmserve.errors import InternalError, Unavailable
from llmserve.serving.streams import Outbox
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


class State(Enum):
    STARTING = auto()
    OPEN = auto()
    FAILED = auto()  # the last attempt to start it again failed; there will be others
    ENDED = auto()


class ProcessHost:
    """See `instance.Host`."""

    def __init__(self, spec: ModelSpec, server: LocalServer, environment: Environment | None = None) -> None:
        self.is_async = False
        self.queues = False  # what it is given dies with the process
        self._environment = environment
        self._spec = spec
        self._server = server
        self._opened: Future[None] = Future()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._life: Life | None = None
        self._waiting: list[Batch] = []  # for a process that can take them
        self._unreleased: list[Done] = []  # of batches that died with a process
        self._problem = ""
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"model-{spec.instance_name}", daemon=True)

    def start(self) -> Future[None]:
        self._thread.start()
        return self._opened

    def submit(self, work: Sequence[tuple[InferRequest, ServerLine]], on_done: Done, outbox: Outbox) -> Kill:
        self._server.open(asyncio.get_running_loop())
        numbered = [(next(self._numbers), request, line) for request, line in work]
        message = m.Execute(next(self._numbers), tuple((number, request) for number, request, _ in numbered))
        batch = Batch({number: line for number, _, line in numbered}, message, on_done)
        for number, line in batch.lines.items():
            line.when_cancelled(partial(self._tell_cancelled, number))
        with self._lock:
            if self._state is State.STARTING:
                self._waiting.append(batch)
            elif self._state is State.OPEN and self._life is not None:
                self._life.execute(batch)
            else:
                self._refuse([batch])
        return partial(self._end_batch, batch)

    def alive(self) -> bool:
        return self._state is State.OPEN

    def problem(self) -> str:
        """A process that is being started takes requests already: they wait for it."""
        return "" if self._state in (State.OPEN, State.STARTING) else self._problem

    def abandon(self) -> None:
        threading.Thread(target=self.stop, args=(0.0,), daemon=True).start()

    def stop(self, timeout_s: float) -> bool:
        with self._lock:
            self._state = State.ENDED
            self._ending.set()
            if self._life is not None:
                self._life.send(m.End())
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._lock:
            if self._life is not None:
                self._life.kill()
        self._thread.join()
        return False

    def _end_batch(self, batch: Batch, why: str) -> None:
        """With its process, if that has it."""
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

    def _supervise(self) -> None:
        back_off = BackOff()
        while True:
            started = time.monotonic()
            self._live()
            if self._ending.is_set():
                self._release()
                return
            if self._opened.exception() is not None:
                return
            self._ending.wait(back_off.pause_after(time.monotonic() - started))

    def _live(self) -> None:
        """One process, from its start to its end."""
        try:
            process = ModelProcess(self._environment)
        except OSError as error:
            self._fail(f"its process cannot be started: {error}")
            return
        life = Life(process, self._spec.instance_name)
        calls = ServerCalls(self._server, life.send)
        life.start(m.Open(self._spec))
        with self._lock:
            self._life = life
            if self._ending.is_set():
                life.kill()
        try:
            while True:
                self._take(life.receive(), life, calls)
        except EOFError:
            pass
        except Exception:  # border: what the model's process has sent cannot be used
            logger.exception("model instance '%s': its process sends what cannot be read", self._spec.instance_name)
            life.kill()
        how = life.wait()
        was_open = self._bury(life, calls, how)
        if was_open:
            logger.warning("model instance '%s': %s", self._spec.instance_name, self._problem)
        elif not (life.has_answered or self._ending.is_set()):
            self._fail(f"its process {how} while the model was loaded")

    def _bury(self, life: Life, calls: ServerCalls, how: str) -> bool:
        """Answer what the process had. If it could take requests, as is returned, later ones wait for the next one."""
        with self._lock:
            self._life = None
            was_open = self._state is State.OPEN
            if was_open:
                self._state = State.STARTING
                self._problem = f"its process {how}, and is being started again"
            elif self._state is State.ENDED:
                self._problem = f"its process {how}"
            lines, unreleased = life.left()
            self._unreleased += unreleased
        calls.cancel_all()
        for line in lines:
            line.post(self._failure())
        return was_open

    def _take(self, message: object, life: Life, calls: ServerCalls) -> None:
        match message:
            case m.Response(number, response):
                life.respond(number, response)
            case m.Done(number):
                life.finish(number)
            case m.Call():
                calls.begin(message)
            case m.CancelCall(number):
                calls.cancel(number)
            case m.Ask():
                calls.ask(message)
            case m.LogLine(name, level, text):
                logging.getLogger(name).log(level, "%s", text)
            case m.Opened(error, is_async):
                life.has_answered = True
                if error is None:
                    self._open(life, is_async)
                else:
                    self._fail(str(error), error)
            case m.Dead():
                life.kill()

    def _open(self, life: Life, is_async: bool) -> None:
        self.is_async = is_async
        with self._lock:
            if self._state is not State.ENDED:
                self._state = State.OPEN
            waiting, self._waiting = self._waiting, []
            for batch in waiting:
                life.execute(batch)
        self._release()
        if not self._opened.done():
            self._opened.set_result(None)

    def _fail(self, problem: str, error: Exception | None = None) -> None:
        """The model could not be opened. Requests do not wait for the next attempt."""
        if not self._opened.done():
            self._opened.set_exception(error or self._error(problem))
            return
        with self._lock:
            self._problem = problem
            if self._state is not State.ENDED:
                self._state = State.FAILED
            waiting, self._waiting = self._waiting, []
        logger.error("model instance '%s' could not be started again: %s", self._spec.instance_name, problem)
        self._refuse(waiting)
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
